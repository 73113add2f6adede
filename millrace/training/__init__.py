"""Training drafters: `millrace train-drafter` distils a small drafter from a target model's own answers.

Start with `train.py`, the stages in order. `prompts.py` chooses prompts, `answers.py` lets the target answer them,
`target.py` recomputes its hidden states batch by batch, `tasks/` holds what each kind of drafter learns, `loop.py` the
optimiser, `measure.py` acceptance on held-out prompts, `export.py` what is written. May import `llm` and below.
"""
