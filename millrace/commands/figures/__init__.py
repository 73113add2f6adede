"""Commands that measure servers or show their figures: load, objectives, cost, traces, profiles."""
