"""Strop: a compiler and runtime that makes PyTorch diffusion models fast."""
