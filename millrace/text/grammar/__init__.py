"""Holds answers to a grammar: checks it, compiles it off the loop, and says which tokens may come next.

`translate.py` turns a `Grammar` into llguidance's form, `gbnf.py` one notation into another, and `problems.py`
llguidance's errors into sentences. `inline.py` checks schemas and writes them into Lark grammars. `check.py` finds
what is wrong with a grammar itself. `compiler.py` compiles in threads and remembers. `environment.py` tells llguidance
the model's vocabulary; `matcher.py` follows one answer.
"""
