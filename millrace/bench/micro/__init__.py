"""Benchmarks of one layer each: scheduler, CPU step, front, channel, and scheduling policies on a trace."""
