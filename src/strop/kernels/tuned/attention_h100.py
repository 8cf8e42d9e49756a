"""Hold what attention takes on an H100, case by case, by each library and by kernels of ours.

`python benchmarks/attention_cases.py SWEEP...` writes this file from the sweeps of
`benchmarks/fit_kernels.py attn_libraries`.
"""

from __future__ import annotations

from strop.kernels.attention.cases import Cases

CASES: Cases = ()
