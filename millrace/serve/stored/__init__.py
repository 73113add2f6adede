"""Files and batches, and the work that runs without a waiting client.

Imports `generate`, `http`, `tenancy`, and the OpenAI and Responses dialects, whose requests a batch can hold.
Start with `batch_store` (the states of a batch), then `batch_run` (one batch) and `background` (what runs when).
"""
