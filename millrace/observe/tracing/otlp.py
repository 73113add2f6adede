"""Spans in OTLP's protobuf encoding. Only the fields that we send, written by hand: a few dozen lines against a
dependency on protobuf in every front."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass, field

Value = str | bool | int | float | list[str]
INTERNAL, SERVER = 1, 2
"""Span kinds."""


@dataclass(frozen=True, slots=True)
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
    scope_spans = _message(1, scope) + b"".join(_message(2, _span(span)) for span in spans)
    return _message(1, _message(1, _attributes(1, resource)) + _message(2, scope_spans))


def _span(span: Span) -> bytes:
    parts = [_bytes(1, span.trace_id), _bytes(2, span.span_id)]
    if span.state:
        parts.append(_text(3, span.state))
    if span.parent_id:
        parts.append(_bytes(4, span.parent_id))
    parts += [_text(5, span.name), _varint_field(6, span.kind), _fixed64(7, span.start_ns), _fixed64(8, span.end_ns)]
    parts.append(_attributes(9, span.attributes))
    if span.error:
        parts.append(_message(15, _text(2, span.error) + _varint_field(3, 2)))
    return b"".join(parts)


def _attributes(number: int, values: Mapping[str, Value]) -> bytes:
    return b"".join(_message(number, _text(1, key) + _message(2, _value(value))) for key, value in values.items())


def _value(value: Value) -> bytes:
    if isinstance(value, str):
        return _text(1, value)
    if isinstance(value, bool):
        return _varint_field(2, int(value))
    if isinstance(value, int):
        return _varint_field(3, value)
    if isinstance(value, float):
        return _key(4, 1) + struct.pack("<d", value)
    return _message(5, b"".join(_message(1, _value(one)) for one in value))


def _key(number: int, wire_type: int) -> bytes:
    return _varint(number << 3 | wire_type)


def _varint(value: int) -> bytes:
    value &= (1 << 64) - 1
    found = bytearray()
    while value > 0x7F:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    found.append(value)
    return bytes(found)


def _varint_field(number: int, value: int) -> bytes:
    return _key(number, 0) + _varint(value)


def _fixed64(number: int, value: int) -> bytes:
    return _key(number, 1) + struct.pack("<Q", value)


def _bytes(number: int, value: bytes) -> bytes:
    return _key(number, 2) + _varint(len(value)) + value


def _message(number: int, value: bytes) -> bytes:
    return _bytes(number, value)


def _text(number: int, value: str) -> bytes:
    return _bytes(number, value.encode("utf-8", "replace"))
