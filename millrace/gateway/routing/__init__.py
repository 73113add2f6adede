"""Which replica a request goes to: pure decisions, their inputs, their log. Start with `policies.py`."""
