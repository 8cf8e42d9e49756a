"""Make machine code: compilers, the disk cache, the driver, and builds in the background."""
