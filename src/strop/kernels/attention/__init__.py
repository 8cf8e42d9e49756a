"""Hold the kernels of attention."""
