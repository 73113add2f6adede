"""Executes a StepPlan on a device and returns the tokens drawn.

`runner.py` (CPU) and `cuda_runner.py` (GPU) implement the `AnyRunner` protocol; `make.py` chooses one. Start with
`runner.py`: the CPU path shows a whole step on one screen. From top to bottom: the runners; `graphs/` and `cpu/`;
`packet/` and `sampling/`; `table/`; `device/`. A part imports only parts below it.
May import `models`, `ops`, `host` and the data types of `plan`; never `engine`, `link` or `serve`.
"""
