"""This machine: usable cores, time slices, memory given back, and files read ahead of their first use.

Nothing here is needed for correct results: every function does nothing where the system lacks what it needs. May import
only `config`, `errors` and the standard library. Start with `cores.py`.
"""
