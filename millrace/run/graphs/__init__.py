"""CUDA graphs of padded steps: the work of a step, capture and warm-up.

Start with `step_work.py` (what a step does) and `graph_cache.py` (capture and replay).
"""
