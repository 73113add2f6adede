"""Streams that another replica can continue: they name their token ids, and begin after those that a caller has."""
