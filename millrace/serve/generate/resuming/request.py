"""What a gateway asks of a stream: that it can be continued elsewhere, or that it continues one.

Two replicas that get the same request and the same X-Request-Id give an answer the same ids and, if it names no seed,
the same seed.
"""

from __future__ import annotations

import base64
import binascii
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np
from aiohttp import web

from millrace.errors import BadRequest, Forbidden
from millrace.serve.http.app_keys import REQUEST_ID
from millrace.serve.state import FrontState
from millrace.serve.tenancy.trust import is_gateway

RESUME_HEADER = "X-Millrace-Resume"
"""1, or the Unix time at which the answer counts as created."""
TOKENS_HEADER = "X-Millrace-Resume-Tokens"
"""By choice, separated by commas: base64 of uint32 ids, with "!" after those of a choice that has ended."""
_TOKEN: np.dtype[np.uint32] = np.dtype("<u4")
_LATEST = 1 << 40


@dataclass(frozen=True, slots=True)
class Received:
    """What the client has of a choice."""

    token_ids: list[int]
    has_ended: bool = False


NOTHING = Received([])


@dataclass(frozen=True, slots=True)
class Resumable:
    request_id: str
    created: int | None = None
    """None: now."""
    received: tuple[Received, ...] | None = None
    """By choice; None if the answer begins here."""

    @property
    def seed(self) -> int:
        return int.from_bytes(self._digest("seed")[:8], "big") >> 1

    def id_of(self, prefix: str, *place: object) -> str:
        """The id of a part of the answer, the same on every replica."""
        return prefix + self._digest(prefix, *place).hex()

    def _digest(self, *parts: object) -> bytes:
        return blake2b("\0".join(map(str, (self.request_id, *parts))).encode(), digest_size=16).digest()


def resumable_of(request: web.Request, state: FrontState) -> Resumable | None:
    """None if the headers ask for nothing, or for no more than marks from a client that is no gateway."""
    lines = request.headers.getall(TOKENS_HEADER, [])
    if RESUME_HEADER not in request.headers and not lines:
        return None
    server = state.config.server
    if not is_gateway(request, server.host, server.gateway_key, has_keys=state.keyring is not None):
        if lines:
            raise Forbidden(
                f"Only a gateway may send {TOKENS_HEADER}: use an operator's key or --gateway-key.", param=TOKENS_HEADER
            )
        return None
    received = tuple(map(_received, "".join(lines).split(","))) if lines else None
    return Resumable(request[REQUEST_ID], _created(request.headers.get(RESUME_HEADER, "1")), received)


def _created(text: str) -> int | None:
    if not (text.isascii() and text.isdigit() and 1 <= int(text[:20]) < _LATEST):
        raise BadRequest(f"The header {RESUME_HEADER} is {text[:80]!r}; send 1 or a Unix time.", param=RESUME_HEADER)
    return int(text) if int(text) > 1 else None


def _received(text: str) -> Received:
    text = text.strip()
    try:
        ids = np.frombuffer(base64.b64decode(text.removesuffix("!"), validate=True), _TOKEN).tolist()
    except (binascii.Error, ValueError):
        raise BadRequest(
            f"The header {TOKENS_HEADER} has {text[:80]!r}; send base64 of little-endian uint32 token ids.",
            param=TOKENS_HEADER,
        ) from None
    return Received(ids, text.endswith("!"))
