"""The parts of a front's client of the engine: open requests, what they receive, questions, adapters, checks."""
