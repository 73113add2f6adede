"""Fault injection against a real server: disconnects, malformed requests, killed processes and overload.

Each module runs one kind of fault and counts what happened; `millrace faults` decides whether that is acceptable.
May import everything below `commands`. Start with `leak_check.py` and `wire.py` (the raw client).
"""
