"""Convolutions that are no implicit GEMM, and what they need."""
