"""Metrics, logging, the audit log and a progress bar.

May import `config`, `errors` and the messages in `link`; never torch. Nothing here runs per token.
Start with `metrics.py`.
"""
