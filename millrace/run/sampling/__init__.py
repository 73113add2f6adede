"""Drawing tokens from logits, penalties and log-probabilities.

`sampler.py` defines the meaning in torch and runs on a CPU; `device_sampler.py` does the same in CUDA graphs.
"""
