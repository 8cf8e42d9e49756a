"""Fusion groups -> loop IR."""
