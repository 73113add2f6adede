"""Audit log: one JSON line per request with tenant, times, token counts and outcome.

Prompts, answers and keys are never written. Several fronts append to the same file, each line with a single write. When
the file has been moved or deleted, a new one is opened, so log rotation needs no signal.
"""

from __future__ import annotations

import logging
import os
import time
from typing import Any

import msgspec

from millrace.errors import ConfigError

log = logging.getLogger("millrace.observe")

CHECK_INTERVAL_S = 1.0
"""How often `write` checks whether the file was moved."""


class AuditLog:
    def __init__(self, path: str) -> None:
        self._path = path
        try:
            self._descriptor = self._open()
        except OSError as error:
            raise ConfigError(
                f"The audit log {path} cannot be opened: {error.strerror}. Set --audit-log to a writable file.",
                param="observe.audit_log",
            ) from error
        self._checked_at = time.monotonic()
        self._encode = msgspec.json.Encoder().encode

    def write(self, record: dict[str, Any]) -> None:
        try:
            self._reopen_if_moved()
            os.write(self._descriptor, self._encode(record) + b"\n")
        except OSError as error:
            log.error("The audit log %s cannot be written: %s", self._path, error.strerror)

    def close(self) -> None:
        os.close(self._descriptor)

    def _open(self) -> int:
        return os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def _reopen_if_moved(self) -> None:
        now = time.monotonic()
        if now - self._checked_at < CHECK_INTERVAL_S:
            return
        self._checked_at = now
        opened = os.fstat(self._descriptor)
        try:
            present = os.stat(self._path)
            if (present.st_ino, present.st_dev) == (opened.st_ino, opened.st_dev):
                return
        except FileNotFoundError:
            pass
        os.close(self._descriptor)
        self._descriptor = self._open()
