"""The step log: every plan with its masks and what it drew, in a file from which the same steps can be run again.

A file begins with a line that names its version. Then come records: a `RunnerSetup` for every start of the engine, and
after it the engine's step messages, as `plan/codec` writes them, with the results of the steps.
"""

from __future__ import annotations

import contextlib
import logging
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from millrace.errors import ConfigError
from millrace.plan.codec.layout import VERSION
from millrace.run.ranks.recorder import RESULT, Record, RecordReader, RunnerSetup

log = logging.getLogger(__name__)

FIRST_LINE = b"millrace step log %d\n" % VERSION
RECORD = struct.Struct("<BxxxI")
"""Kind and length of the record that follows."""


class StepLog:
    """A file of records. One that cannot be written ends the log, not the engine."""

    def __init__(self, file: Path) -> None:
        self._file: BinaryIO | None = _open_for_more(file)

    def write(self, kind: int, data: bytes) -> None:
        if self._file is None:
            return
        try:
            self._file.write(RECORD.pack(kind, len(data)) + data)
            if kind == RESULT:
                self._file.flush()
        except OSError:
            log.exception("the step log ends here: its file cannot be written")
            with contextlib.suppress(OSError):  # Closing tries to write again.
                self._file.close()
            self._file = None


def _open_for_more(file: Path) -> BinaryIO:
    """Records are added to a log of this version. What an earlier engine did not write whole is removed."""
    if not file.is_file() or not file.stat().st_size:
        opened = file.open("ab")
        opened.write(FIRST_LINE)
        return opened
    with file.open("r+b") as existing:
        try:
            _check_first_line(existing, file)
        except ValueError as error:
            raise ConfigError(f"{error} Or give --step-log another file.", param="step_log") from error
        end = len(FIRST_LINE) + sum(RECORD.size + len(data) for _, data in _records(existing))
        existing.truncate(end)
    return file.open("ab")


def read_log(file: Path) -> list[Record]:
    """The records of the engine's last start. A record cut off at the end is left out. Raises a ValueError."""
    found: list[Record] = []
    reader = RecordReader()
    with file.open("rb") as source:
        _check_first_line(source, file)
        for kind, data in _records(source):
            record = reader.read(kind, data)
            if isinstance(record, RunnerSetup):
                found = []
            found.append(record)
    return found


def _check_first_line(source: BinaryIO, file: Path) -> None:
    line = source.read(len(FIRST_LINE))
    if line == FIRST_LINE:
        return
    name = FIRST_LINE[: FIRST_LINE.rindex(b" ") + 1]
    # Version 1 had no such line: it began with the length of a record, 8 bytes.
    if line.startswith(name) or (line[3:8] == bytes(5) and line[:3] != bytes(3)):
        raise ValueError(
            f"{file} is a step log of another version; this Millrace reads and writes version {VERSION}. Record the"
            " steps again."
        )
    raise ValueError(f"{file} is no step log.")


def _records(source: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """Kind and content of each record that was written whole."""
    while len(head := source.read(RECORD.size)) == RECORD.size:
        kind, length = RECORD.unpack(head)
        data = source.read(length)
        if len(data) < length:
            return
        yield kind, data
