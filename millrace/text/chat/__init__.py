"""Renders conversations with the model's own Jinja chat template.

`template.py` finds, checks and renders templates. `sandbox.py` limits what a template can reach and how much time and
memory it can use.
"""
