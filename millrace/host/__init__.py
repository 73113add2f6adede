"""This machine: usable cores, time slices, returning idle memory, reading files into the page cache.

Nothing here is needed for correct results: every function does nothing where the system lacks what it needs. May import
only `config`, `errors` and the standard library. Start with `cores.py`.
"""
