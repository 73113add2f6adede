"""Weights as the blocks of a GGUF file: what the bytes of each format mean, and products with them.

Start with `decode.py`, which decodes a tile of any format (`words.py`: those that are read by words); `product.py`
multiplies by such tiles.
"""
