"""Converts between text and token ids: tokenizers, streaming detokenization, stop strings and chat templates.

May import `config`, `errors`, `params` and `sources`; never torch. Used by the fronts and by the offline `LLM`.
Start with `tokenizers/tokenizer.py`, then `text_stream.py`, which turns the tokens of one choice into text.
"""
