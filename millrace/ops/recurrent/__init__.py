"""Ops with a recurrent state: a causal convolution, and a linear recurrence (gated delta rule, Mamba2).

Where states are is said in `base/state_rows.py`. Each file begins with the torch reference.
"""
