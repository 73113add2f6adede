"""Kept prefixes and sessions as signed files, which move between replicas of a model."""
