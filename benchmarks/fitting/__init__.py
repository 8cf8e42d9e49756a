"""The sweeps of ``benchmarks/fit_kernels.py``: our kernels at many shapes, beside a library."""
