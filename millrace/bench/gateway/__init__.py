"""Gateways measured over null replicas. Start with `null_replica.py`."""
