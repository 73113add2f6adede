"""Keeps the counts of objectives across restarts: one file per front in the server's data directory."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from pathlib import Path
from typing import Any

import msgspec

from millrace.serve.state import FrontState

SAVE_EVERY_S = 60.0
log = logging.getLogger(__name__)


class KeptObjectives:
    def __init__(self, state: FrontState) -> None:
        self._state = state
        self._path = state.store.directory / f"objectives-{state.client.front_index}.json"
        self._saving: asyncio.Future[None] | None = None
        if self._is_needed:
            self._restore()

    @property
    def _is_needed(self) -> bool:
        return any(figures.slos.objectives for figures in self._state.metrics.models.values())

    def _restore(self) -> None:
        try:
            stored = msgspec.json.decode(self._path.read_bytes(), type=dict[str, dict[str, Any]])
            for name, figures in self._state.metrics.models.items():
                figures.slos.restore(stored.get(name, {}))
        except FileNotFoundError:
            return
        except (OSError, msgspec.MsgspecError, LookupError, TypeError, ValueError) as error:
            log.warning("The counts of objectives in %s cannot be read and start again: %s", self._path, error)

    def save_soon(self, loop: asyncio.AbstractEventLoop) -> None:
        """In a thread: a slow disk must not delay streams."""
        if self._is_needed and (self._saving is None or self._saving.done()):
            self._saving = loop.run_in_executor(None, self._write, self._encoded())

    def save(self) -> None:
        if self._is_needed:
            self._write(self._encoded())

    def _encoded(self) -> bytes:
        return msgspec.json.encode({name: one.slos.stored() for name, one in self._state.metrics.models.items()})

    def _write(self, data: bytes) -> None:
        part = self._path.with_suffix(".part")
        with contextlib.suppress(OSError):  # A full disk costs the counts, never the server.
            self._path.parent.mkdir(parents=True, exist_ok=True)
            _replace(part, self._path, data)


def _replace(part: Path, path: Path, data: bytes) -> None:
    part.write_bytes(data)
    os.replace(part, path)
