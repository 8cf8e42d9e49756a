"""Hold the kernels of matrix products: linears, gated linears, and convolutions as implicit
GEMMs."""
