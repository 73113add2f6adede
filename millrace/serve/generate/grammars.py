"""Checks a request's grammar before anything is generated, in a thread and within a time limit."""

from __future__ import annotations

import asyncio
import logging

from millrace.errors import BadRequest, RequestFailed
from millrace.params import Grammar
from millrace.serve.state import FrontState
from millrace.text.grammar.compiler import Unusable

CHECK_LIMIT_S = 10.0

log = logging.getLogger("millrace.serve")


async def check_grammar(state: FrontState, grammar: Grammar, owner: str, *, param: str) -> None:
    """Raise `BadRequest` if no answer can be held to this grammar. `param` is the field that set it. Results are
    remembered per owner."""
    if not state.tokenizer.end_token_ids:
        raise BadRequest("This model has no end token, so its answers cannot be held to a grammar.", param=param)
    future = state.grammar_check.submit(grammar, owner)
    if not future.done():
        # `wait` cancels nothing: other requests may wait for the same result.
        await asyncio.wait([asyncio.wrap_future(future)], timeout=CHECK_LIMIT_S)
    if not future.done():
        raise BadRequest(
            f"The {grammar.noun} was not checked within {CHECK_LIMIT_S:g} s; simplify it or try again.", param=param
        )
    if future.cancelled() or future.exception() is not None:
        log.error("a grammar could not be checked", exc_info=None if future.cancelled() else future.exception())
        raise RequestFailed(f"The server failed to check the {grammar.noun}; see the server's log.")
    result = future.result()
    if isinstance(result, Unusable):
        raise BadRequest(result.message, param=param, code="invalid_schema")
