"""Build machine code, and run programs with it."""
