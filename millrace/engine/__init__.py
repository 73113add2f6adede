"""The engine: one loop that plans, launches and confirms steps for one model, and the process around it.

Joins `plan`, `run`, `models` and `link`; knows nothing of HTTP, text or the command line. Start with `loop.py`;
`build.py` puts an engine together, `memory_plan.py` sizes its memory, `ledger.py` records its requests.
"""
