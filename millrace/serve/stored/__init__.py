"""Files and batches, and the work that runs without a waiting client.

Imports `generate`, `http` and `tenancy`; no dialect: the app passes in the endpoints that a batch can call.
Start with `batch_store` (the states of a batch), then `batch_run` (one batch) and `background` (what runs when).
"""
