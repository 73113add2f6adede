"""What is decided before an engine is built. Start with `decide.py`."""
