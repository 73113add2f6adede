"""The planner of encoders: no KV cache, whole texts."""
