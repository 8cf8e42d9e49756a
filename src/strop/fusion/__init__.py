"""Which nodes share a kernel, and how. Data in, data out."""
