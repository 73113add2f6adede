"""Quotas and budgets of tenants, exact across gateways through a shared store. Start with `limits.py`."""
