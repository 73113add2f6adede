"""A replica's right to ask another one for blocks: one question, for a short time. The gateway's key, which replicas of
one fleet share, signs it and does not travel."""

from __future__ import annotations

import hmac
from hashlib import blake2b

TICKET_HEADER = "X-Millrace-Kv-Ticket"
BLOCKS_PATH = "/v1/kv/blocks"
"""A request there with a ticket needs no API key."""
LIFE_S = 60.0
"""A ticket is valid for so long, and for as long before, since clocks differ."""


def ticket_for(asked: bytes, model: str, key: str, now: float) -> str:
    """`now`: seconds since 1970. `asked`: the question, which names the prefix, the first block and their number."""
    issued, digest = str(int(now)), _digest(asked)
    return f"{issued}.{digest}.{_signature(issued, digest, model, key)}"


def is_valid(ticket: str, model: str, key: str, now: float) -> bool:
    """Before the question is read."""
    issued, _, rest = ticket.partition(".")
    digest, _, signature = rest.partition(".")
    if not key or not signature or not issued.isdecimal() or len(issued) > 12 or abs(now - int(issued)) > LIFE_S:
        return False
    expected = _signature(issued, digest, model, key)
    return hmac.compare_digest(signature.encode(errors="surrogateescape"), expected.encode())


def covers(ticket: str, asked: bytes) -> bool:
    """Whether a valid ticket is for this question."""
    return hmac.compare_digest(ticket.split(".")[1].encode(errors="surrogateescape"), _digest(asked).encode())


def _digest(asked: bytes) -> str:
    return blake2b(asked, digest_size=32).hexdigest()


def _signature(issued: str, digest: str, model: str, key: str) -> str:
    secret = blake2b(key.encode(errors="surrogateescape"), digest_size=32, person=b"kv-ticket").digest()
    text = f"{issued}.{digest}.{model}".encode(errors="surrogateescape")
    return hmac.new(secret, text, "sha256").hexdigest()
