"""What a caller asks: plain data, validated here, read by `plan` (limits) and `run` (sampling).

Start with `sampling.py`. May import `errors` alone.
"""
