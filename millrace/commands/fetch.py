"""`millrace fetch`: brings a model onto this machine and shows how far it has come."""

from __future__ import annotations

import argparse

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from millrace.commands.obtain import fetch_shown, is_here
from millrace.commands.parser import UsageError
from millrace.config import DEFAULT_MODEL
from millrace.sources.known_models import KNOWN_MODELS
from millrace.sources.resolve import ModelFiles, resolve_model

USAGE = "millrace fetch [MODEL …] [--all]"
EXAMPLES = """\
examples:
  millrace fetch                        the default model
  millrace fetch qwen2.5-coder-1.5b     one known by name (millrace models lists them)
  millrace fetch org/name               one of the Hugging Face hub
  millrace fetch --all                  every model known by name (about 2 GB)"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "models", nargs="*", metavar="MODEL", help=f"a known name or a hub id (default: {DEFAULT_MODEL})"
    )
    parser.add_argument("--all", action="store_true", help="every model known by name")


def run(args: argparse.Namespace) -> int:
    if args.all and args.models:
        raise UsageError("--all means every known model; leave out the names.")
    for source in [model.name for model in KNOWN_MODELS] if args.all else args.models or [DEFAULT_MODEL]:
        files = resolve_model(source) if is_here(source) else fetch_shown(source)
        print(f"{files.name} is in {files.path}", flush=True)
    return 0


def fetch_with_progress(source: str, console: Console | None = None) -> ModelFiles:
    """Resolve `source` with a progress bar on standard error. What is here already shows no bar."""
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TimeRemainingColumn(),
        console=console or Console(stderr=True),
        transient=True,
    )
    with bar:
        return resolve_model(source, progress=_Display(bar))


class _Display:
    """Turns (what, done, total) reports into tasks of one bar: a new task when what is done changes."""

    def __init__(self, bar: Progress) -> None:
        self._bar = bar
        self._what = ""
        self._task: TaskID | None = None

    def __call__(self, what: str, done: int, total: int) -> None:
        if what != self._what and self._task is not None:
            self._bar.remove_task(self._task)
            self._task = None
        if self._task is None:
            self._task = self._bar.add_task(what, total=total or None)
            self._what = what
        self._bar.update(self._task, completed=done, total=total or None)
