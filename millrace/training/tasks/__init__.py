"""What each kind of drafter learns, and how many of its drafts the target would accept.

`task.py` is the interface; `eagle.py`, `medusa.py` and `draft.py` are the kinds, `make.py` chooses. May import `models`
and `training.target`.
"""
