"""What an answer must conform to: asked for by one field of a request, checked before anything is generated."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from dataclasses import dataclass

import msgspec

from millrace.errors import BadRequest, Overloaded, RequestFailed
from millrace.params.grammar import Grammar, GrammarKind
from millrace.serve.generate.generation import Generation
from millrace.serve.state import FrontState
from millrace.text.grammar.compiler import Unusable
from millrace.text.grammar.inline import closed_schema, tightened_schema

CHECK_LIMIT_S = 10.0
RETRY_S = 5.0

log = logging.getLogger("millrace.serve")


@dataclass(frozen=True, slots=True)
class Format:
    grammar: Grammar
    field: str
    """The request's field that asks for it."""


def format_of(field: str, kind: GrammarKind, source: str = "", *, whitespace: str = "") -> Format:
    try:
        return Format(Grammar(kind, source, whitespace=whitespace), field)
    except BadRequest as error:
        raise BadRequest(error.message, param=field, code=error.code) from None


def schema_format(field: str, schema: msgspec.Raw, *, whitespace: str = "", closed: bool = False) -> Format:
    """A schema, or a text that holds one. `closed`: no object has properties besides those that are named, even if
    their names stand in several places."""
    data = bytes(schema)
    try:
        if data.lstrip()[:1] == b'"':
            data = msgspec.json.decode(data, type=str).encode()
        text = data.decode()
        source = closed_schema(text) if closed else tightened_schema(text)
        return format_of(field, "json_schema", source, whitespace=whitespace)
    except UnicodeError:
        message = f"'{field}' is not valid UTF-8; encode its texts as UTF-8."
        raise BadRequest(message, param=field, code="invalid_utf8") from None
    except (ValueError, RecursionError):
        raise BadRequest(f"'{field}' is not a JSON schema, or is nested too deeply.", param=field) from None


def only_format(formats: Iterable[Format | None]) -> Format | None:
    """The one that is set. Two are refused: an answer conforms to one of them."""
    given = [one for one in formats if one is not None]
    if len(given) > 1:
        names = " and ".join(f"'{one.field}'" for one in given[:2])
        raise BadRequest(f"{names} both say what the answer must conform to; send one of them.", param=given[1].field)
    return given[0] if given else None


async def check_grammar(state: FrontState, generation: Generation, owner: str) -> None:
    """Raise `BadRequest` if no answer can be held to the generation's grammar. Compiles in a thread and within a time
    limit. Results are remembered per owner."""
    grammar, param = generation.params.grammar, generation.format_field
    if grammar is None:
        return
    if not state.tokenizer.end_token_ids:
        raise BadRequest("This model has no end token, so its answers cannot be held to a grammar.", param=param)
    future = state.grammar_check.submit(grammar, owner)
    if not future.done():
        # `wait` cancels nothing: other requests may wait for the same result.
        await asyncio.wait([asyncio.wrap_future(future)], timeout=CHECK_LIMIT_S)
    if not future.done():
        if not future.running():
            message = "Other grammars are being checked, and this one was not reached; try again in a few seconds."
            raise Overloaded(message, retry_after_s=RETRY_S)
        raise BadRequest(
            f"The {grammar.noun} was not checked within {CHECK_LIMIT_S:g} s; simplify it or try again.", param=param
        )
    if future.cancelled() or future.exception() is not None:
        log.error("a grammar could not be checked", exc_info=None if future.cancelled() else future.exception())
        raise RequestFailed(f"The server failed to check the {grammar.noun}; see the server's log.")
    result = future.result()
    if isinstance(result, Unusable):
        raise BadRequest(result.message, param=param, code="invalid_schema")
