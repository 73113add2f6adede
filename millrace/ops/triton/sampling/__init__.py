"""Drawing tokens on the GPU, without sorting and without waiting for the host: greedy and sampled.

Start with `draw.py`; `triton/row_records.py` says what the kernels know of a row. Imports only `ops/tuning` and
the files of `ops/triton` itself.
"""
