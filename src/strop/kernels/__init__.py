"""Kernels written by hand, as sources that the runtime builds and launches."""
