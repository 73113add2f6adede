"""Drafters: small modules trained to guess what a target model will write next, read from what others or we trained.

Start with `spec.py` (what a drafter is) and `load.py` (from a directory to a drafter that runs). `formats.py` reads the
config.json of each format, `checkpoint.py` its tensors under one set of names. `program.py` runs a drafter with the ops
of the decoder over paged KV; `modules.py` is the same in plain torch: the reference, and what training optimises.
May import `load` and everything below it.
"""
