"""Holds answers to a grammar: checks it, compiles it off the loop, and says which tokens may come next.

`translate.py` turns a `Grammar` into llguidance's form and its errors into sentences; `compiler.py` compiles in threads
and remembers; `environment.py` tells llguidance the model's vocabulary; `matcher.py` follows one answer.
"""
