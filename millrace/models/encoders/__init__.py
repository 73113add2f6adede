"""Encoders: models that read a whole text at once and give a vector or logits, without a KV cache.

`spec` says what a family's layers are, `load` reads the weights, `encoder` runs packed texts, `heads` turns the states
of their tokens into one result per text.
"""
