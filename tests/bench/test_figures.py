from __future__ import annotations

import pytest

from millrace.bench.figures import Figure, print_table

LONG = "smooth: beside the sixty streams of another tenant"


def test_a_narrow_terminal_folds_names_and_never_cuts_a_figure(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    figures = [
        Figure(LONG, "small tenant's 16 tokens, p50", 12345.0, "tokens/s", 1234),
        Figure(LONG, "gap p99", 403.2, "ms", 7),
    ]
    print_table(figures, "Streams")
    shown = capsys.readouterr().out
    assert "12,345" in shown
    assert "403.2" in shown
    assert "tokens/s" in shown
    assert "1234" in shown
    assert "…" not in shown
    assert "note" not in shown
    assert max(map(len, shown.splitlines())) <= 60
    print_table([*figures, Figure("a", "b", 1.0, "s", note="3 requests failed")], "Streams")
    noted = " ".join(capsys.readouterr().out.split())
    assert "failed" in noted
    assert "12,345" in noted
