"""`make screenshots` takes its pictures from a running server."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from serve.front_under_test import running_front
from web.conftest import NAMES
from web.watched import answering

pytestmark = [pytest.mark.live, pytest.mark.alone]


@pytest.mark.skipif(not any(map(shutil.which, NAMES)), reason="Chromium is not installed")
def test_every_picture_of_the_documentation_is_taken(tmp_path: Path) -> None:
    pytest.importorskip("playwright.sync_api", reason="Playwright is not installed")
    tool = Path(__file__).parents[2] / "tools" / "screenshots.py"
    answer = '{"city": "Bonn", "country": "Germany", "population": 330000}'
    with running_front(answering({"JSON": answer}, "The air scatters blue light more than red.")) as front:
        command = [sys.executable, str(tool), "--url", front.url, "--out", str(tmp_path)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    pictures = {path.stem: path.stat().st_size for path in tmp_path.glob("*.png")}
    assert set(pictures) == {"playground", "schema", "dashboard"}
    assert all(10_000 < size < 300_000 for size in pictures.values()), pictures
