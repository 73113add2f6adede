"""OpenAI's dialect: /v1/chat/completions and /v1/completions.

`schemas` (requests) and `answers` are the wire format; `translate_*` turn a body into a `Generation`; `write_*` turn
events into frames and bodies. Imports `generate` and below, never another dialect. Start with `routes`.
"""
