"""Reads GGUF models without trusting their contents.

`reader.py` reads one file, `model.py` joins the parts of a split model, and `config.py` translates the metadata into a
Hugging Face config.
"""
