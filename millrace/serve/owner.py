"""Whose things are whose: files, batches and stored responses are visible only to the owner that made them."""

from __future__ import annotations

from aiohttp import web

OWNER = "millrace_owner"
"""The request's key under which whoever authorises it leaves the owner's name."""


def owner_of(request: web.Request) -> str:
    """Empty where requests are not told apart."""
    return str(request.get(OWNER, ""))
