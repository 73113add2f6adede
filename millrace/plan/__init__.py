"""Decides what the next step computes: which requests, how many tokens of each, in which KV blocks.

May import only the standard library, NumPy, `config`, `errors` and `params`: no torch, no clock, no randomness.
Start with `step.py`, the plan as data, then `scheduler.py`. `rows.py` holds the running requests, `queue/` the waiting
ones, `kv/` the blocks.
"""
