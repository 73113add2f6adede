"""Matrix products on a GPU with a weight of 4-bit codes that stays packed (W4A16).

`layout.py` defines how codes lie in memory, and a kernel that dequantises them. `few_rows.py` multiplies up to 32 rows,
`many_rows.py` more, on Hopper. A weight's value is (code - zero) * scale, rounded to the model's dtype in each of them.
"""
