"""Request bodies: size, media type, JSON, types. An error names the field, its value and what to send instead."""

from __future__ import annotations

import asyncio
import re
import types
import typing
from functools import cache
from typing import Any, TypeVar

import msgspec
from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.web_protocol import RequestPayloadError

from millrace.errors import BadRequest, BodyTooLarge, RequestTimeout, UnsupportedMediaType
from millrace.serve.http.field_hints import field_hint

BODY_TIMEOUT_S = 60.0
"""Time in which a client must send its whole body."""

_T = TypeVar("_T", bound=msgspec.Struct)
_AT = re.compile(r"^(?P<what>.*?)(?: - at `\$?(?P<path>.*)`)?$", re.DOTALL)
_UNKNOWN = re.compile(r"Object contains unknown field `(.*)`", re.DOTALL)
_STEP = re.compile(r"\.?([^.\[\]]+)|\[(\d+|\.\.\.)\]")
_TYPE_NAMES = {
    "int": "an integer",
    "float": "a number",
    "str": "a string",
    "bool": "true or false",
    "null": "null",
    "array": "an array",
    "object": "an object",
}
_OLLAMA_TYPES = ("application/x-www-form-urlencoded", "application/octet-stream")
"""What clients of Ollama send JSON as beside its own type: the default of `curl -d`, and of HTTP."""
_MAX_SHOWN_CHARS = 80
_MAX_EXPLAINED_BYTES = 1 << 20


# ── reading ───────────────────────────────────────────────────────────────────────────────────────────────────────────
def check_headers(request: web.Request, limit_bytes: int) -> None:
    """Refuse what can be refused before the body is read."""
    if request.content_length is not None and request.content_length > limit_bytes:
        raise _too_large(request.content_length, limit_bytes)
    encoding = request.headers.get("Content-Encoding", "identity").strip().lower()
    if encoding not in ("", "identity"):
        raise UnsupportedMediaType(
            f"The body has Content-Encoding {encoding[:_MAX_SHOWN_CHARS]!r}; send it as plain, uncompressed JSON."
        )
    if "Content-Type" in request.headers:
        _check_content_type(request)


def _check_content_type(request: web.Request) -> None:
    media_type = request.content_type.lower()
    if request.path.startswith("/api/") and media_type in _OLLAMA_TYPES:
        return
    if media_type != "application/json":
        sent = request.headers["Content-Type"]
        raise BadRequest(
            f"The body has Content-Type {sent[:_MAX_SHOWN_CHARS]!r}; send it as application/json.",
            code="unsupported_media_type",
        )
    charset = request.charset
    if charset is not None and charset.lower().replace("_", "-") not in ("utf-8", "utf8", "us-ascii"):
        raise UnsupportedMediaType(f"The body has charset {charset[:_MAX_SHOWN_CHARS]!r}; send it as UTF-8.")


async def read_body(request: web.Request, limit_bytes: int) -> bytes:
    """The whole body, at most `limit_bytes` of it, within `BODY_TIMEOUT_S`."""
    check_headers(request, limit_bytes)
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            return await _read_at_most(request, limit_bytes)
    except (RequestPayloadError, HttpProcessingError) as error:
        raise BadRequest(
            f"The body's transfer encoding is broken: {' '.join(str(error).split())[:_MAX_SHOWN_CHARS]}",
            code="malformed_http",
        ) from None
    except TimeoutError:
        raise RequestTimeout(f"The body did not arrive within {BODY_TIMEOUT_S:g} s; send it without pausing.") from None


async def _read_at_most(request: web.Request, limit_bytes: int) -> bytes:
    pieces: list[bytes] = []
    total = 0
    while piece := await request.content.readany():
        total += len(piece)
        if total > limit_bytes:
            raise _too_large(total, limit_bytes)
        pieces.append(piece)
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)


def _too_large(num_bytes: int, limit_bytes: int) -> BodyTooLarge:
    return BodyTooLarge(
        f"The body has at least {num_bytes} bytes; this server accepts at most {limit_bytes}."
        " Send less, or start the server with a larger --body-limit-mb."
    )


# ── decoding ──────────────────────────────────────────────────────────────────────────────────────────────────────────
class BodyDecoder(typing.Generic[_T]):
    """Decodes JSON strictly into one struct type. An unknown field that is null counts as left out: clients send back
    whole answers with every field that their version knows."""

    def __init__(self, struct: type[_T]) -> None:
        self._struct = struct
        self._decoder = msgspec.json.Decoder(struct)

    def decode(self, body: bytes) -> _T:
        if not body:
            raise BadRequest("The body is empty; send a JSON object.", code="empty_body")
        try:
            try:
                return self._decoder.decode(body)
            except msgspec.ValidationError as error:
                parsed, problem = _parse(body), str(error)
                if parsed is None or not _UNKNOWN.match(problem):
                    raise _explain(problem, parsed, self._struct) from None
            _drop_unknown_nulls(parsed, [self._struct])
            try:
                return self._decoder.decode(msgspec.json.encode(parsed))
            except msgspec.ValidationError as error:
                raise _explain(str(error), parsed, self._struct) from None
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise json_error(error, body) from None


def _drop_unknown_nulls(value: Any, kinds: list[Any]) -> None:
    """Remove fields that are null and that no struct of these types has, in all structs inside. Objects of free form,
    such as JSON schemas, are left as they are."""
    if isinstance(value, list):
        inner = _inner_types(kinds, list)
        for entry in value:
            _drop_unknown_nulls(entry, inner)
    elif isinstance(value, dict):
        structs = [kind for kind in kinds if _is_struct(kind) and _may_be(value, kind)]
        if not structs:
            inner = _inner_types(kinds, dict)
            for entry in value.values():
                _drop_unknown_nulls(entry, inner)
            return
        fields = _fields_of(tuple(structs))
        for name in [name for name, entry in value.items() if entry is None and name not in fields]:
            del value[name]
        for name in value.keys() & fields.keys():
            _drop_unknown_nulls(value[name], fields[name])


def _inner_types(kinds: list[Any], origin: type) -> list[Any]:
    """The types of the entries, where one of the types is a list or a dictionary."""
    found = [typing.get_args(kind)[-1] for kind in kinds if typing.get_origin(kind) is origin]
    return [member for kind in found for member in _members(kind)]


def _is_struct(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, msgspec.Struct)


def _may_be(value: dict[str, Any], struct: type[msgspec.Struct]) -> bool:
    config = struct.__struct_config__
    return config.tag_field is None or value.get(config.tag_field, config.tag) == config.tag


@cache
def _fields_of(structs: tuple[type[msgspec.Struct], ...]) -> dict[str, list[Any]]:
    """Types of the fields by their names in JSON; a tag has none."""
    found: dict[str, list[Any]] = {}
    for struct in structs:
        hints = typing.get_type_hints(struct, include_extras=True)
        for name, shown in zip(struct.__struct_fields__, struct.__struct_encode_fields__, strict=True):
            found.setdefault(shown, []).extend(_members(hints[name]))
        if struct.__struct_config__.tag_field is not None:
            found.setdefault(struct.__struct_config__.tag_field, [])
    return found


def _parse(body: bytes) -> Any:
    """The body as plain objects, to quote a value from. Malformed JSON is reported before a wrong field. None for a
    body that is too long to build."""
    if len(body) > _MAX_EXPLAINED_BYTES:
        return None
    try:
        return msgspec.json.decode(body)
    except msgspec.ValidationError:
        return None  # A number beyond floats; the error about the field is clearer.
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise json_error(error, body) from None


def json_error(error: Exception, body: bytes) -> BadRequest:
    """The error for bytes that are not JSON."""
    if isinstance(error, UnicodeDecodeError):
        what = f"The body is not valid UTF-8 ({error.reason}); encode its texts as UTF-8."
        return BadRequest(what, code="invalid_utf8")
    if isinstance(error, RecursionError):
        return BadRequest("The body is nested too deeply; send fewer levels.", code="invalid_json")
    return BadRequest(f"The body is not valid JSON: {_malformed(str(error), body)}", code="invalid_json")


def _malformed(problem: str, body: bytes) -> str:
    problem = problem.removeprefix("JSON is malformed: ").rstrip(".")
    if re.search(rb"[:\[,]\s*-?(NaN|Infinity)", body):
        problem += "; JSON has no NaN or Infinity"
    elif body.startswith(b"\xef\xbb\xbf"):
        problem = "it begins with a byte-order mark; send it without one"
    elif "surrogate" in problem or re.search(rb"\\u[dD][89a-fA-F]", body):
        problem += "; a \\u escape of half a surrogate pair is not a character"
    return problem + "."


def _explain(problem: str, parsed: Any, struct: type[msgspec.Struct]) -> BadRequest:
    """msgspec's message as an error that names the field, what was sent and what to send."""
    match = _AT.match(problem)
    what, path = (match["what"], match["path"] or "") if match else (problem, "")
    param = path.removeprefix(".").removesuffix("[...]")
    unknown = _UNKNOWN.fullmatch(what)
    if unknown:
        return _unknown_field(unknown[1], param, path, struct)
    missing = re.fullmatch(r"Object missing required field `(.*)`", what)
    if missing:
        name = f"{param}.{missing[1]}" if param else missing[1]
        return BadRequest(f"'{name}' is required.", param=name, code="missing_field")
    shown = _value_at(parsed, path)
    name = f"'{param}'" if param else "The body"
    expected = re.fullmatch(r"Expected `(.*?)`(?:, got `(.*)`)?", what)
    if expected:
        return BadRequest(
            f"{name}{shown}; send {_spoken(expected[1])} instead.", param=param or None, code="invalid_type"
        )
    choices = _choices_at(path, struct)
    remedy = f"{what[0].lower()}{what[1:]}."
    if choices:
        remedy = f"it must be {'one of ' if len(choices) > 1 else ''}{', '.join(choices)}."
    return BadRequest(f"{name}{shown}; {remedy}", param=param or None, code="invalid_value")


def _unknown_field(field: str, at: str, path: str, struct: type[msgspec.Struct]) -> BadRequest:
    place = f"'{at}'" if at else "this endpoint"
    hint = field_hint(field, _structs_at(path, struct))
    name = f"{at}.{field}" if at else field
    return BadRequest(
        f"'{field[:_MAX_SHOWN_CHARS]}' is not a parameter of {place}. {hint}",
        param=name[:200],
        code="unknown_field",
    )


def _spoken(expected: str) -> str:
    """ "int | null" as "an integer or null"."""
    return " or ".join(_TYPE_NAMES.get(name, name) for name in expected.split(" | "))


def _steps(path: str) -> list[str | int]:
    return [name or (index if index == "..." else int(index)) for name, index in _STEP.findall(path)]


def _value_at(parsed: Any, path: str) -> str:
    """ " is <the value>", shortened; " has a wrong value" if the path does not lead to one."""
    value = parsed
    try:
        for step in _steps(path):
            value = value[step]
    except (KeyError, IndexError, TypeError):
        return " has a wrong value"
    if isinstance(value, (dict, list)):
        return " is an object" if isinstance(value, dict) else " is an array"
    text = msgspec.json.encode(value).decode()
    return f" is {text if len(text) <= _MAX_SHOWN_CHARS else text[:_MAX_SHOWN_CHARS] + '…'}"


# ── the schema at a path ──────────────────────────────────────────────────────────────────────────────────────────────
def _members(kind: Any) -> list[Any]:
    """The members of a union, without annotations."""
    if typing.get_origin(kind) is typing.Annotated:
        return _members(typing.get_args(kind)[0])
    if isinstance(kind, types.UnionType) or typing.get_origin(kind) is typing.Union:
        return [member for part in typing.get_args(kind) for member in _members(part)]
    return [kind]


def _types_at(path: str, struct: type[msgspec.Struct]) -> list[Any]:
    found: list[Any] = [struct]
    for step in _steps(path):
        found = [member for kind in found for inner in _step_into(kind, step) for member in _members(inner)]
    return found


def _step_into(kind: Any, step: str | int) -> list[Any]:
    if _is_struct(kind):
        return [hint for name, hint in typing.get_type_hints(kind, include_extras=True).items() if name == step]
    args = typing.get_args(kind)
    return [args[-1]] if args else []


def _structs_at(path: str, struct: type[msgspec.Struct]) -> list[type[msgspec.Struct]]:
    return [kind for kind in _types_at(path, struct) if _is_struct(kind)]


def _choices_at(path: str, struct: type[msgspec.Struct]) -> list[str]:
    """The allowed values at a path: of a literal, or the tags of a union of structs."""
    literals = [
        str(choice)
        for kind in _types_at(path, struct)
        if typing.get_origin(kind) is typing.Literal
        for choice in typing.get_args(kind)
    ]
    parent, _, field = path.rpartition(".")
    tags = [
        str(kind.__struct_config__.tag)
        for kind in _structs_at(parent, struct)
        if kind.__struct_config__.tag_field == field
    ]
    return list(dict.fromkeys(literals or tags))  # Members of a union may share a field.


async def read_any_body(request: web.Request, limit_bytes: int) -> bytes:
    """Also of uploads, which are not JSON; they may take as long as they go on."""
    if request.content_type == "application/json":
        return await read_body(request, limit_bytes)
    pieces: list[bytes] = []
    total = 0
    try:
        while True:
            async with asyncio.timeout(BODY_TIMEOUT_S):
                piece = await request.content.readany()
            if not piece:
                return b"".join(pieces)
            pieces.append(piece)
            total += len(piece)
            if total > limit_bytes:
                raise BodyTooLarge(f"The body has more than {limit_bytes} bytes, the limit. Send a smaller one.")
    except (RequestPayloadError, HttpProcessingError) as error:
        raise BadRequest(f"The upload broke off: {str(error)[:_MAX_SHOWN_CHARS]}", code="malformed_http") from None
    except TimeoutError:
        raise RequestTimeout(f"Nothing of the body arrived for {BODY_TIMEOUT_S:g} s; send it again.") from None
