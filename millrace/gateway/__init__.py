"""The gateway: one address in front of many replicas. Start with `app.py`; `relay.py` carries one request.

A gateway knows replicas only through their public API, and keeps nothing that another gateway cannot rebuild.
"""
