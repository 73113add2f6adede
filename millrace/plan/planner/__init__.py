"""What the engine asks of a planner, and what a planner notes for those who are told of its cache."""
