"""Anthropic's Messages API: /v1/messages and its token count.

Imports `generate` and `http`; no other dialect. Start with `translate` (request to work), then `write` (output to
message or events).
"""
