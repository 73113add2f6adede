"""Drafting: proposes the next tokens of a row, and decides which of them a verified step accepts.

`ngram.py` proposes from the row's own text; `drafted_rows.py` keeps what a CPU needs to verify: each row's tokens and
how far it is. May import what `run` may; knows no sampler and no model.
"""
