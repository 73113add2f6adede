"""CUDA graphs of padded steps: bucket sizes, the work of a step, capture, fallback and warm-up.

Start with `step_work.py` (what a step does) and `graph_cache.py` (capture and replay).
"""
