"""Service level objectives: parsing, evaluation over several windows, alert rules and a dashboard made from them.

Start with `objective.py`.
"""
