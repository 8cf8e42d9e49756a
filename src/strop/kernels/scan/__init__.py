"""Hold kernels that walk along a dim, each step of which reads the one before."""
