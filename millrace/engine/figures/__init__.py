"""What the engine counts: figures of steps, the last steps, shares of tenants. Start with `step_figures.py`."""
