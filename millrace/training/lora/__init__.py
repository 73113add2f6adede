"""Training LoRA adapters: `millrace train-adapter` learns answers to prompts and writes what PEFT reads.

Start with `train.py`, the stages in order. `examples.py` reads the data, `model.py` puts low-rank matrices beside the
frozen linears, `task.py` is the loss, `files.py` writes PEFT's directory, `merge.py` adds an adapter to its model.
"""
