"""Mixture of experts: routing tokens to experts, and computing the chosen experts.

May import linear, elementwise, triton and base.
"""
