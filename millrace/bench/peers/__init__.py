"""`millrace bench peers`: Millrace and other engines in alternating turns on the same workloads.

`rounds.py` runs the comparison, `compared_engine.py` is one engine in it, `bars.py` holds the limits for our figures.
"""
