"""The audit log: one JSON line per request, for those who must be able to say who asked what and when.

It holds who, when, how much and how it ended; never prompts, answers or keys. Several fronts append to one file: a line
is one write. A file that was moved away is opened anew, so that log rotation needs no signal.
"""

from __future__ import annotations

import logging
import os
import time
from typing import Any

import msgspec

from millrace.errors import ConfigError

log = logging.getLogger("millrace.observe")

LOOK_EVERY_S = 1.0


class AuditLog:
    def __init__(self, path: str) -> None:
        self._path = path
        try:
            self._descriptor = self._open()
        except OSError as error:
            raise ConfigError(
                f"The audit log {path} cannot be written: {error.strerror}.", param="observe.audit_log"
            ) from error
        self._looked_at = time.monotonic()
        self._encode = msgspec.json.Encoder().encode

    def write(self, record: dict[str, Any]) -> None:
        try:
            self._follow()
            os.write(self._descriptor, self._encode(record) + b"\n")
        except OSError as error:
            log.error("The audit log %s cannot be written: %s", self._path, error.strerror)

    def close(self) -> None:
        os.close(self._descriptor)

    def _open(self) -> int:
        return os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def _follow(self) -> None:
        now = time.monotonic()
        if now - self._looked_at < LOOK_EVERY_S:
            return
        self._looked_at = now
        mine = os.fstat(self._descriptor)
        try:
            there = os.stat(self._path)
            if (there.st_ino, there.st_dev) == (mine.st_ino, mine.st_dev):
                return
        except FileNotFoundError:
            pass
        os.close(self._descriptor)
        self._descriptor = self._open()
