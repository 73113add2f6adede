"""Matrix product kernels, and the choice between them by measured tables.

Few rows: `product.py` (what tiles mean) and `kernels.py`. Many rows, Hopper only, in Gluon: `gated_many.py` and
`greedy_head.py` on `operand_ring.py`. `choice.py` looks tiles up. May import `ops/base` and `ops/tuning`.
"""
