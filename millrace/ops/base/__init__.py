"""What every room of `ops` may use: how a version declares itself, and the values that ops pass to each other.

Start with `version.py`. Imports nothing else of Millrace.
"""
