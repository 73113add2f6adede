"""Conversations with tools and reasoning: how a request asks for them, and how a choice reads them.

Start with `open_chat`, which every dialect calls.
"""
