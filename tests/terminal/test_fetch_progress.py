"""The progress bar of a download."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from millrace.errors import ModelError
from millrace.sources.download import Progress
from millrace.sources.resolve import ModelFiles
from millrace.terminal import download_bar
from millrace.terminal.download_bar import fetch_with_progress

FILES = ModelFiles("toy", "random", Path("config.json"), {}, ())


def show(monkeypatch: pytest.MonkeyPatch, reports: list[tuple[str, int, int]]) -> str:
    def resolve(source: str, *, progress: Progress, offline: bool) -> ModelFiles:
        assert source == "toy"
        for report in reports:
            progress(*report)
        return FILES

    monkeypatch.setattr(download_bar, "resolve_model", resolve)
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=120)
    assert fetch_with_progress("toy", console) is FILES
    return screen.getvalue()


def test_bar_shows_task_and_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    text = show(monkeypatch, [("fetching toy", 0, 2_000_000), ("fetching toy", 1_500_000, 2_000_000)])
    assert "fetching toy" in text
    assert "1.5/2.0 MB" in text


def test_new_task_replaces_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    text = show(monkeypatch, [("fetching toy", 5, 5), ("assembling toy", 1, 9), ("assembling toy", 9, 9)])
    assert "9/9 bytes" in text.rpartition("assembling")[2]


def test_unknown_total_is_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "from the hub" in show(monkeypatch, [("fetching org/name from the hub", 0, 0)])


def test_errors_pass_through(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ModelError, match="There is no model 'nonsense'"):
        fetch_with_progress("nonsense", Console(file=io.StringIO()))
