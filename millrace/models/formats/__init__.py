"""Formats of quantised checkpoints: each file says how the stored bytes of one format become a weight.

Start with `base.py`, the interface; `read.py` finds the format of a checkpoint. Imports `ops.linear`.
"""
