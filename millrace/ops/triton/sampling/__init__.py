"""Drawing tokens on the GPU, without sorting and without waiting for the host: greedy and sampled.

Start with `draw.py`; `row_records.py` says what the kernels know of a row. Imports only `ops/tuning` and
`dependent_launch` beside its own files.
"""
