"""OpenAI's Responses API: create, continue, retrieve, cancel and delete responses; `background` runs them later.

Imports `generate`, `http`, `tenancy`, `stored` and the database; no other dialect.
Start with `routes`, then `translate` (request to work) and `write` (output to response or events).
"""
