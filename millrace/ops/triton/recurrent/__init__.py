"""Kernels of `ops/recurrent`: a row's tokens one after the other, so that a captured graph runs rows of any length.

Imported only when a version that needs them is made.
"""
