"""The KV blocks as the scheduler sees them: ids, reference counts, hashes. Their memory belongs to `run`.

Start with `block_pool.py`, then `prefix.py`, which finds cached prefixes, and `host_tier.py`, which keeps evicted
blocks in host memory. May import what `plan` may, and `plan`'s data types.
"""
