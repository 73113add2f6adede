"""Compiling Triton kernels ahead of their first launch, in parallel, into Triton's cache on disk.

`dry_run.py` finds out which kernels a step needs; `build_server.py` is the process that compiles them. The engine's
side is `run/graphs/kernel_build_pool.py`. Imports no other package of `ops` at import time.
"""
