"""The formats of the paged KV cache: plain, eight bits with scales, and packed (bfloat16 in twelve bits).

`cache.py` defines the layouts and holds the reference that writes and reads them. Imports only base.
"""
