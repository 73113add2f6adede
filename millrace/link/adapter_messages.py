"""What fronts and engines say about adapters."""

from __future__ import annotations

from typing import Literal

import msgspec


class AddAdapter(msgspec.Struct, frozen=True):
    """The adapter in this directory is to be known by this name. Answered when it was read and checked."""

    name: str
    path: str
    is_new: bool = False
    """Refuse a name that is known."""
    is_told: bool = False
    """A front tells a new engine what the one before knew, so it replaces nothing and ends no canary."""


class AddCanary(msgspec.Struct, frozen=True):
    """A share of the adapter's requests is to go to the version in this directory. Answered when it was read."""

    name: str
    path: str
    share: float
    max_failed: float
    """It is taken back if the share of its requests that fail is above that of the old version by more than this."""
    max_slowdown: float
    """It is taken back if a token takes more than this many times as long as with the old version (medians)."""


class VersionFigures(msgspec.Struct, frozen=True):
    """Of one version, since its canary began."""

    requests: int = 0
    """Sequences that ended by themselves, or failed."""
    failed: int = 0
    token_ms: float = 0.0
    """Median of the last ones; 0 without any."""


class CanaryFigures(msgspec.Struct, frozen=True):
    """A new version of an adapter that gets a share of its requests, or got it."""

    adapter: str
    state: Literal["running", "promoted", "aborted", "returned"]
    share: float
    path: str
    why: str = ""
    """Why it was taken back (`returned`)."""
    old: VersionFigures = VersionFigures()
    new: VersionFigures = VersionFigures()


class CanaryStats(msgspec.Struct, frozen=True):
    running: tuple[CanaryFigures, ...] = ()
    ended: dict[str, int] = {}
    """By how they ended, since the start."""


class AdapterFigures(msgspec.Struct, frozen=True):
    """One adapter of a model."""

    name: str
    path: str
    state: Literal["known", "loading", "memory", "resident", "failed"]
    """known: not read yet, or no longer in memory; resident: it has a slot on the device."""
    max_rank: int = 0
    bytes: int = 0
    base_model: str = ""
    """As the adapter's own files name it."""
    open_requests: int = 0
    loads: int = 0
    """Times that its files were read."""
    failure: str = ""
    is_added: bool = False
    """Added while the server ran."""
    requests: int = 0
    """Sequences that ended."""
    prompt_tokens: int = 0
    output_tokens: int = 0
    canary: CanaryFigures | None = None
    """The last one, if there was any."""


class AdapterAnswer(msgspec.Struct, frozen=True):
    """The answer to a `Query` about adapters."""

    adapters: list[AdapterFigures] = []
    error: str = ""
    """Why nothing was changed."""
    is_unknown: bool = False
    """There is none with this name."""
