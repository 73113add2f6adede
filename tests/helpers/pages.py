"""The documentation as tests read it: its pages, links, headings and examples."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
]

_FENCE = re.compile(
    r"^(?P<indent> *)```(?P<kind>\w*)[^\n]*\n(?P<text>.*?)^(?P=indent)```[ ]*$", re.DOTALL | re.MULTILINE
)
_LINK = re.compile(r"(?<!`)\[[^\]]*\]\(([^)\s]+)\)")


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def without_blocks(text: str) -> str:
    return _FENCE.sub("", text)


def prose(text: str) -> str:
    """`text` without blocks and spans of code."""
    return re.sub(r"`[^`\n]*`", "", without_blocks(text))


def links(text: str) -> list[str]:
    return _LINK.findall(prose(text))


def slugs(text: str) -> set[str]:
    """Anchors of the headings, as GitHub and mkdocs make them."""
    found: set[str] = set()
    for heading in re.findall(r"^#+ +(.+?) *#*$", _FENCE.sub("", text), re.MULTILINE):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "")
        slug = base = re.sub(r"[^\w\- ]", "", plain.lower()).replace(" ", "-")
        count = 0
        while slug in found:
            count += 1
            slug = f"{base}-{count}"
        found.add(slug)
    return found


def blocks(text: str, *kinds: str) -> Iterator[str]:
    """Code blocks of these kinds, without their indentation."""
    for match in _FENCE.finditer(text):
        if match["kind"] in kinds:
            indent = len(match["indent"])
            yield "\n".join(line[indent:] for line in match["text"].splitlines()) + "\n"
