"""Shapes of steps: what a runner declares of those it has (`declared.py`), which one a step runs at (`choice.py`), and
which have a graph (`captures.py`)."""
