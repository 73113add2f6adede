"""Where a row's drafts come from, as the kernels that place them say it."""

OWN_DRAFTS, PREDICTED = 0, 1
"""The engine's drafter; the row's prediction."""
