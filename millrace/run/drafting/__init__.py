"""Drafting: proposes the next tokens of a row, and decides which of them a verified step accepts.

`drafter.py` is the interface; `ngram.py`, `suffix.py` and `prediction.py` propose from text, `chain.py` and `medusa.py`
from models; `drafted_rows.py` keeps what a CPU needs to verify: each row's tokens and how far it is. On a GPU the
columns are in `device_drafts.py`, and `device_chain.py` runs a draft model. May import what `run` may.
"""
