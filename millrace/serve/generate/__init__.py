"""The internal form of a request, and everything between it and the engine that does not depend on a dialect.

A dialect translates its body into a `Generation` (`messages`, `prompts`, `sampling` and `checks` help) and gives a
`Writer`. `respond` answers over HTTP, `work` without a client; both run a `Job`, whose choices turn tokens into events.

Imports `state`, `tenancy` and `http`, never a dialect. Start with `generation`, then `job` and `choices`.
"""
