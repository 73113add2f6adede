"""Commands that answer with the simulator what a machine would do."""
