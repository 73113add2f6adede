"""Ollama's API: /api/chat, /api/generate, and the descriptions of the served model.

Imports `generate` and `http`; no other dialect. Start with `routes`, then `translate` (request to generation) and
`write` (output to JSON lines).
"""
