"""The shapes that a runner declares: which there are and what their keys stand for (`table.py`), and which get a graph
first (`order.py`). Plans name them; only runners know what a key means."""
