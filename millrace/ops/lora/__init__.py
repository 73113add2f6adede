"""Low-rank addends of many adapters in one batch: out += scale · B (A x), each token with its own A and B."""
