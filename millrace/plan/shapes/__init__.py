"""Shapes of steps: which there are (`table.py`), which a step runs at (`choice.py`), and which have a graph
(`captures.py`). Pure: what the device can do comes as data (`ShapeFacts`)."""
