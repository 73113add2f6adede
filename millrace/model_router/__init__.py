"""Chooses a model for requests with `model: "auto"`: the small one where it is good enough, else the large one.

Everything here is pure: a decision depends on the request, the tenant's budget and the trained file alone.
"""
