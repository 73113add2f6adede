"""What an engine answers when a tenant is to be forgotten."""

from __future__ import annotations

import msgspec


class ForgottenTenant(msgspec.Struct, frozen=True):
    """The answer to the queries `forget` and `forgotten`."""

    requests: int
    """That were open and have been cancelled."""
    handles: int
    blocks: dict[str, int]
    """By location."""
    is_erased: bool
    """False while blocks are being erased on the disk: ask `forgotten` again."""
    failure: str = ""
    """Why the disk could not be erased."""
