"""Sets up logging to standard error.

Loggers are named after packages (`logging.getLogger("millrace.engine")`). Prompts and answers are never logged.
"""

from __future__ import annotations

import logging
import sys
from typing import TextIO

from millrace.config import LogLevel

_COLOURS = {"DEBUG": "\033[2m", "WARNING": "\033[33m", "ERROR": "\033[31m", "CRITICAL": "\033[31m"}
_LEVELS: dict[LogLevel, int] = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
}


def setup_logging(level: LogLevel, *, process: str = "", stream: TextIO | None = None) -> None:
    """Send all log messages to `stream` (default: standard error). A second call replaces the first.

    `process` is shown in each line ("engine", "front 1"), since several processes share one terminal.
    """
    out = stream if stream is not None else sys.stderr
    handler = logging.StreamHandler(out)
    handler.setFormatter(LineFormatter(process, colour=out.isatty()))
    logger = logging.getLogger("millrace")
    logger.handlers = [handler]
    logger.propagate = False
    logging.getLogger().handlers = [handler]
    set_level(level)


def set_level(level: LogLevel) -> None:
    """Other libraries log warnings and errors only, in the same format."""
    logging.getLogger("millrace").setLevel(_LEVELS[level])
    logging.getLogger().setLevel(max(_LEVELS[level], logging.WARNING))


class LineFormatter(logging.Formatter):
    """`14:03:07.123 warning engine | message`, coloured on a terminal, followed by the traceback if there is one."""

    default_time_format = "%H:%M:%S"
    default_msec_format = "%s.%03d"

    def __init__(self, process: str, *, colour: bool) -> None:
        super().__init__()
        self._process = f" {process}" if process else ""
        self._colour = colour

    def format(self, record: logging.LogRecord) -> str:
        # Escape line breaks: a message with one could forge the next log line.
        message = record.getMessage().replace("\n", "\\n").replace("\r", "\\r")
        line = f"{self.formatTime(record)} {record.levelname.lower()}{self._process} | {message}"
        if self._colour and record.levelname in _COLOURS:
            line = f"{_COLOURS[record.levelname]}{line}\033[0m"
        if record.exc_info:
            line += "\n" + self.formatException(record.exc_info)
        return line
