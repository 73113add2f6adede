"""Commands that train: drafters and adapters."""
