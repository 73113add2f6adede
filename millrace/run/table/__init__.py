"""The request table: what the device knows of each row, and how a step's inputs are gathered from it."""
