"""Matrix products with weights: dense, FP8, stored in a GGUF format, and the fused first half of a gated MLP.

Start with `dense.py`, which defines the `Linear` protocol. May import triton, tuning, cpp and base.
"""
