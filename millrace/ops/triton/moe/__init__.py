"""Mixture of experts: routing, grouping and the experts' products.

Start with `experts.py`, which launches the kernels; `config.py` chooses tiles from the measured tables. May import
`ops/base`, `ops/tuning` and the activation names.
"""
