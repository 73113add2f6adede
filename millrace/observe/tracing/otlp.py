"""Spans in OTLP's protobuf encoding. Only the fields that we send, written by hand: a few dozen lines against a
dependency on protobuf in every front.

A server ends thousands of requests per second with five spans each, so what repeats is encoded once: names, and
attributes with few values.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache

Value = str | bool | int | float | tuple[str, ...]
INTERNAL, SERVER, CLIENT = 1, 2, 3
"""Span kinds."""
KEPT = 4096
"""Encoded texts and attributes that are kept."""
MAX_KEPT_CHARS = 64

_TIMES = struct.Struct("<BQBQ")
_SMALL = [bytes([value]) for value in range(0x80)]


@dataclass(slots=True)
class Span:
    trace_id: bytes
    span_id: bytes
    parent_id: bytes
    name: str
    start_ns: int
    """Unix time."""
    end_ns: int
    kind: int = INTERNAL
    attributes: Mapping[str, Value] = field(default_factory=dict)
    error: str = ""
    """Empty: the span ended well."""
    state: str = ""


def encode_request(spans: list[Span], resource: Mapping[str, Value], version: str) -> bytes:
    """An ExportTraceServiceRequest."""
    scope = _text(1, "millrace") + _text(2, version)
    scope_spans = _bytes(1, scope) + b"".join([_bytes(2, _span(span)) for span in spans])
    return _bytes(1, _bytes(1, _attributes(1, resource)) + _bytes(2, scope_spans))


def _span(span: Span) -> bytes:
    parts = [_bytes(1, span.trace_id), _bytes(2, span.span_id)]
    if span.state:
        parts.append(_text(3, span.state))
    if span.parent_id:
        parts.append(_bytes(4, span.parent_id))
    parts += [_name(span.name, span.kind), _TIMES.pack(7 << 3 | 1, span.start_ns, 8 << 3 | 1, span.end_ns)]
    parts.append(_attributes(9, span.attributes))
    if span.error:
        parts.append(_bytes(15, _text(2, span.error) + _varint_field(3, 2)))
    return b"".join(parts)


@lru_cache(KEPT)
def _name(name: str, kind: int) -> bytes:
    return _text(5, name) + _varint_field(6, kind)


def _attributes(number: int, values: Mapping[str, Value]) -> bytes:
    found = []
    for key, value in values.items():
        is_rare = isinstance(value, str) and len(value) > MAX_KEPT_CHARS
        found.append(_encode_attribute(number, key, value) if is_rare else _attribute(number, key, value))
    return b"".join(found)


def _encode_attribute(number: int, key: str, value: Value) -> bytes:
    return _bytes(number, _text(1, key) + _bytes(2, _value(value)))


_attribute = lru_cache(KEPT, typed=True)(_encode_attribute)


def _value(value: Value) -> bytes:
    if isinstance(value, str):
        return _text(1, value)
    if isinstance(value, bool):
        return _varint_field(2, int(value))
    if isinstance(value, int):
        return _varint_field(3, value)
    if isinstance(value, float):
        return _key(4, 1) + struct.pack("<d", value)
    return _bytes(5, b"".join([_bytes(1, _value(one)) for one in value]))


def _key(number: int, wire_type: int) -> bytes:
    return _varint(number << 3 | wire_type)


def _varint(value: int) -> bytes:
    value &= (1 << 64) - 1
    if value < 0x80:
        return _SMALL[value]
    found = bytearray()
    while value > 0x7F:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    found.append(value)
    return bytes(found)


def _varint_field(number: int, value: int) -> bytes:
    return _key(number, 0) + _varint(value)


def _bytes(number: int, value: bytes) -> bytes:
    """A field of bytes, text or a message."""
    return b"%b%b%b" % (_varint(number << 3 | 2), _varint(len(value)), value)


def _text(number: int, value: str) -> bytes:
    return _bytes(number, value.encode("utf-8", "replace"))
