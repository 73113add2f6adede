"""Options and files of Millrace that the documentation names in a sentence exist."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest
from helpers.pages import PAGES, ROOT, name_of, without_blocks

from millrace.cli import command_parsers

OF_OTHERS = {
    "README.md": "gpu-memory-utilization pipeline-parallel-size max-model-len mmproj",
    "CONTRIBUTING.md": "strict",
    "docs/adapters.md": "lora-modules",
    "docs/deployment.md": "no-deps gpus plat-name",
}
"""Options of other programs, by page, without their dashes."""

HISTORY = ("CHANGELOG.md",)
"""Names what is no longer there."""


@cache
def known_options() -> frozenset[str]:
    actions = (action for parser in command_parsers().values() for action in parser._actions)
    return frozenset(option for action in actions for option in action.option_strings)


@pytest.mark.parametrize("page", [page for page in PAGES if name_of(page) not in HISTORY], ids=name_of)
def test_named_options_and_files_exist(page: Path) -> None:
    spans = re.findall(r"`([^`\n]+)`", without_blocks(page.read_text(encoding="utf-8")))
    options = {option for span in spans for option in re.findall(r"(?<![\w-])--[a-z][a-z0-9-]+", span)}
    of_others = {f"--{name}" for name in OF_OTHERS.get(name_of(page), "").split()}
    assert options - known_options() == of_others
    paths = [path for span in spans for path in re.findall(r"(?:millrace|tests|tools|docs|deploy)/[\w./-]+\w", span)]
    assert [path for path in paths if "." in Path(path).name and not (ROOT / path).exists()] == []
