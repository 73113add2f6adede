"""Finds and downloads models, and reads their files and configurations.

A source is a known name, a directory, a GGUF file, a hub id or `random:<config.json>`.
May import `config` and `errors`; never torch.
Start with `resolve.py`: it turns a source into `ModelFiles`, which `models` and `text` read.
"""
