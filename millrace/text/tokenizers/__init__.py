"""Tokenizers of Hugging Face directories and GGUF files, with the same ids as the model's original tokenizer.

Start with `load.py`, which opens the tokenizer of a model, and `tokenizer.py`, the class that it returns.
The `tokenizers` library encodes; the modules here configure it and decode token by token.
"""
