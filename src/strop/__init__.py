"""Strop: a compiler and runtime that makes PyTorch diffusion models fast."""

__version__ = "0.1.0"

from strop.api import explain, optimize, restore
from strop.options import Options

__all__ = ["Options", "__version__", "explain", "optimize", "restore"]
