"""Watching the replicas: which answer, and what one lacks that comes back."""
