"""Ops that treat each token on its own: RMS norm, gated activation, rotary positions, soft cap.

Each file holds the reference and its faster versions. May import triton, cpp and base.
"""
