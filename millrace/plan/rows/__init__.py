"""Running requests as columns of arrays, a row each, and how long they only decode.

Start with `rows.py`. May import a request and the data types of a step.
"""
