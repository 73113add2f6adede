"""Who may use the server, and how much: API keys and tenants, quotas, admission control, audit log.

Imports `http` of `serve`, and `link` for the engine's stats; no dialect, nothing of `generate`.
Start with `keyring` (tenants), then `quotas` and `admission`. `generate.gate` applies them to every request.
"""
