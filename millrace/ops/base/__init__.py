"""Shared by all packages of `ops`: how a version declares itself, and the values that ops pass to each other.

Start with `version.py`. Imports nothing else of Millrace.
"""
