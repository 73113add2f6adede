"""Who submits a request."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Caller:
    """The tenant that submits a request, and the ids by which its client knows the request."""

    tenant: str = ""
    weight: float = 1.0
    names: tuple[str, ...] = ()
    received: float = 0.0
    """When the front had received the HTTP headers, on `time.monotonic`."""


ANONYMOUS = Caller()
