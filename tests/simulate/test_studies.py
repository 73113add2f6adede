"""Studies: every page in the docs has a command, and a conclusion follows from its own figures."""

from __future__ import annotations

from pathlib import Path

import pytest

from millrace.bench.studies.registry import MEASURED
from millrace.cli import main
from millrace.simulate.profile import read_profile
from millrace.simulate.studies.scheduling import STUDIES, shared_prefix

PAGES = Path(__file__).parents[2] / "docs" / "studies"


def test_every_page_has_its_study_and_plot() -> None:
    """Simulated studies have a page each; measured ones where they were measured. That of adapters has a tool."""
    pages = {file.stem for file in PAGES.glob("*.md")} - {"adapters"}
    assert set(STUDIES) <= pages <= {*STUDIES, *MEASURED}
    for name in pages:
        assert f"millrace study {name} " in (PAGES / f"{name}.md").read_text(encoding="utf-8")
        assert (PAGES / f"{name}.svg").read_text(encoding="utf-8").startswith("<svg xmlns=")


def test_a_shared_prefix_is_computed_once() -> None:
    found = shared_prefix(read_profile("h200-8b"), seed=0)
    # The 100 requests' own tokens and one prefix.
    assert [row[1] for row in found.rows] == [100 * 100 + 2000, 100 * 2100]
    assert "12,000 of 210,000" in found.conclusion


def test_the_command_lists_studies_and_writes_a_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["study"]) == 0
    assert "chunk-size" in capsys.readouterr().out
    assert main(["study", "shared-prefix", "--profile", "h200-8b", "--out", str(tmp_path)]) == 0
    assert (tmp_path / "shared-prefix.md").read_text().startswith("# 100 requests")
    assert "<polyline" in (tmp_path / "shared-prefix.svg").read_text()
    assert main(["study", "nothing", "--profile", "h200-8b"]) == 2
