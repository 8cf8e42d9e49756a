"""Run a program at one shape: memory, launches, library calls, CUDA graphs."""
