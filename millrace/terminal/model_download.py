"""Downloads a model with progress unless it is already on this machine."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from millrace.sources.library import is_downloaded
from millrace.terminal.status_line import StatusLine

if TYPE_CHECKING:
    from millrace.sources.resolve import ModelFiles

__all__ = ["download_model", "is_downloaded", "obtain_model", "print_estimate"]


def obtain_model(source: str, *, offline: bool = False) -> None:
    """Download the model unless it is on this machine; prints nothing if it is."""
    if not is_downloaded(source):
        download_model(source, offline=offline)


def download_model(source: str, *, offline: bool = False) -> ModelFiles:
    """Resolve `source` with progress on standard error: a bar on a terminal, else lines. First says what it needs."""
    if not offline:
        print_estimate(source)
    if sys.stderr.isatty():
        from millrace.terminal.download_bar import fetch_with_progress

        return fetch_with_progress(source, offline=offline)
    from millrace.sources.resolve import resolve_model

    with StatusLine() as line:
        return resolve_model(source, progress=line.show, offline=offline)


def print_estimate(source: str) -> None:
    """Memory and speed of a model that is about to be downloaded, where its size is known beforehand."""
    from millrace.sources.estimate import estimate_lines
    from millrace.sources.hub import describe
    from millrace.sources.known_models import find_known
    from millrace.sources.names import expand_alias, has_gpu, parse_name

    text = expand_alias(source)
    known = find_known(text)
    name = parse_name(text, has_gpu=has_gpu())
    if known is not None:
        num_bytes = known.num_bytes
    elif name is not None:
        num_bytes = describe(name).num_bytes
    else:
        return
    for line in estimate_lines(text, num_bytes):
        print(line, file=sys.stderr, flush=True)
