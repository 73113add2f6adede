"""The file of an exported prefix: a header, then parts of its KV blocks, each with a signature.

A signature covers everything before it, so a file that was changed, cut or put together from others does not verify.
The key is the operator's. Nothing of a part is used before it is verified.

    magic | length | header | signature | length | part | signature | ...
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec

from millrace.errors import BadRequest, ConfigError, Forbidden

MAGIC = b"MILLRACE KV 1\n"
MIN_KEY_BYTES = 32
MAX_HEADER_BYTES = 64 << 20
PART_OVERHEAD = 1 << 16
"""Bytes of an encoded part beside its blocks, at most."""
_LENGTH = struct.Struct("<I")
_SIGNATURE_BYTES = 32

Read = Callable[[int], Awaitable[bytes]]
"""Gives so many bytes, or fewer at the end."""


class KvFileHeader(msgspec.Struct, frozen=True, kw_only=True):
    model: str
    """Name under which it was served: for messages."""
    identity: str
    layout: str
    block_tokens: int
    tenant: str
    name: str
    """Of the handle, or the session's id."""
    cache_salt: str
    ttl_s: float
    tokens: bytes
    """Of the prefix, as int32 bytes: whole blocks."""
    part_blocks: int
    num_parts: int
    session: bytes = b""
    """The session as msgpack; empty for a handle."""


class KvFilePart(msgspec.Struct, frozen=True):
    first: int
    count: int
    has: tuple[tuple[bool, ...], ...]
    blocks: bytes


def read_key(path: str) -> bytes:
    """Raises if there is none."""
    if not path:
        raise Forbidden(
            "This server neither exports nor imports prefixes: files are signed with a key of the operator, who can set"
            " --kv-export-key FILE.",
            code="export_off",
        )
    try:
        key = Path(path).expanduser().read_bytes().strip()
    except OSError as error:
        raise ConfigError(f"--kv-export-key {path} cannot be read: {error.strerror}.", param="kv_export_key") from error
    if len(key) < MIN_KEY_BYTES:
        raise ConfigError(
            f"--kv-export-key {path} has {len(key)} bytes; write at least {MIN_KEY_BYTES} random ones into it.",
            param="kv_export_key",
        )
    return key


class KvFileWriter:
    def __init__(self, key: bytes) -> None:
        self._key = key
        self._before = MAGIC

    def header(self, header: KvFileHeader) -> bytes:
        return MAGIC + self._signed(msgspec.msgpack.encode(header))

    def part(self, part: KvFilePart) -> bytes:
        return self._signed(msgspec.msgpack.encode(part))

    def _signed(self, body: bytes) -> bytes:
        self._before = _signature(self._key, self._before, body)
        return _LENGTH.pack(len(body)) + body + self._before


class KvFileReader:
    def __init__(self, key: bytes, read: Read) -> None:
        self._key = key
        self._read = read
        self._before = MAGIC

    async def header(self) -> KvFileHeader:
        if await self._read(len(MAGIC)) != MAGIC:
            raise refusal("kv_file_unknown", "This is no exported prefix, or one of another version of the format.")
        return msgspec.msgpack.decode(await self._signed("header", MAX_HEADER_BYTES), type=KvFileHeader)

    async def part(self, number: int, max_bytes: int) -> KvFilePart:
        return msgspec.msgpack.decode(await self._signed(f"part {number}", max_bytes), type=KvFilePart)

    async def end(self) -> None:
        if await self._read(1):
            raise refusal("kv_file_tampered", "The file goes on after its last part.")

    async def _signed(self, what: str, max_bytes: int) -> bytes:
        (length,) = _LENGTH.unpack(await self._exactly(what, _LENGTH.size))
        if length > max_bytes:
            raise refusal("kv_file_tampered", f"The file's {what} claims {length} bytes; it has {max_bytes} at most.")
        body = await self._exactly(what, length)
        self._before = _signature(self._key, self._before, body)
        if not hmac.compare_digest(await self._exactly(what, _SIGNATURE_BYTES), self._before):
            raise refusal(
                "kv_file_tampered",
                f"The signature of the file's {what} is wrong: the file was changed, or signed with another key than"
                " that of this server's --kv-export-key.",
            )
        return body

    async def _exactly(self, what: str, count: int) -> bytes:
        data = await self._read(count)
        if len(data) < count:
            raise refusal("kv_file_truncated", f"The file ends within its {what}; export it again.")
        return data


def refusal(code: str, message: str) -> BadRequest:
    return BadRequest(message, code=code)


def _signature(key: bytes, before: bytes, body: bytes) -> bytes:
    return hmac.digest(key, before + hashlib.sha256(body).digest(), "sha256")
