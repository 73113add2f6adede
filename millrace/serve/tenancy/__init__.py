"""Who may use the server, and how much: API keys and tenants, quotas, admission control, audit log.

Imports `http`, `link` for the engine's stats and `observe` for the audit log; no dialect, nothing of `generate`.
Start with `keyring` (tenants), then `quotas` and `admission`. `generate.gate` applies them to every request.
"""
