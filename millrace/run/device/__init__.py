"""What differs between CPU and GPU: launching and waiting, the copy stream, the memory of the KV pool, and
host memory for its blocks.

The lowest part of `run`: it imports no other part of it. Start with `device.py`.
"""
