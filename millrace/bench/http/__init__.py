"""Benchmarks of any OpenAI-compatible server: `suite.py` runs fixed workloads, `serving.py` holds many open streams.

Imports `bench`'s own modules and little else of Millrace, so that any server is measured the same way.
"""
