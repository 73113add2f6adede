"""The KV blocks as the scheduler sees them: ids, reference counts, hashes. Their memory belongs to `run`.

Start with `block_pool.py`, then `prefix.py`, which finds cached prefixes. May import what `plan` may, and `plan`'s data
types.
"""
