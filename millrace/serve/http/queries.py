"""Query strings: pages with `limit`, `order` and `after`; unknown parameters are errors."""

from __future__ import annotations

import difflib
from collections.abc import Collection
from dataclasses import dataclass

from aiohttp import web

from millrace.errors import BadRequest

MAX_PAGE = 10_000


@dataclass(frozen=True, slots=True)
class Page:
    limit: int
    newest_first: bool
    after: str | None


def check_query(request: web.Request, known: Collection[str]) -> None:
    """Refuse unknown query parameters."""
    for name in request.query:
        base = name.removesuffix("[]")
        if base not in known:
            close = difflib.get_close_matches(base, known, n=1, cutoff=0.6)
            hint = f"Did you mean '{close[0]}'?" if close else "Remove it; unknown parameters are not ignored."
            raise BadRequest(
                f"'{name[:80]}' is not a query parameter of {request.path[:200]}. {hint}",
                param=name[:200],
                code="unknown_field",
            )


def page_of(request: web.Request, *, most: int, usual: int) -> Page:
    query = request.query
    raw = query.get("limit", str(usual))
    if not (raw.isascii() and raw.isdigit() and len(raw) <= 9 and 1 <= int(raw) <= most):
        raise BadRequest(f"limit is {raw[:80]!r}; send a whole number from 1 to {most}.", param="limit")
    order = query.get("order", "desc")
    if order not in ("asc", "desc"):
        raise BadRequest(f"order is {order[:80]!r}; it must be one of asc, desc.", param="order")
    return Page(int(raw), order == "desc", query.get("after") or None)
