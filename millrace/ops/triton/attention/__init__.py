"""Paged attention kernels: decode, prefill, shared prefixes, split contexts, and the QKV preparation before them.

`paged_kv.py` holds what they share: reading the cache in its formats, and the online softmax. Start with `decode.py`.
May import `ops/base`, `ops/kv` and `dependent_launch`.
"""
