"""Running programs: memory, library calls, kernels, CUDA graphs, dispatch, disk cache."""
