"""Processes beside the engine that run its steps too: today the mirror, which compares every draw."""
