"""Choose which nodes share a kernel, and how. Data goes in, data comes out."""
