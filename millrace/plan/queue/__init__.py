"""The waiting requests: their order, and how many of them KV memory allows.

Start with `waiting.py`, the queue; `policy.py`, `fair_shares.py` and aging decide the order. `admission_forecast.py`
decides whether one more request fits. May import what `plan` may, and `plan`'s request, rows and block pool.
"""
