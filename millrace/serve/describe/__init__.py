"""Describes the server: OpenAPI document and /docs page, models, health, metrics, running requests, missing endpoints.

Imports the other rooms of `serve`, because the document is generated from their request and answer structs; only the
app's routing imports this room. Start with `openapi`, then `routes_info`.
"""
