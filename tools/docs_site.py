"""A hook of mkdocs: the pages that lie outside `docs/` are part of the site too.

CONTRIBUTING.md and CHANGELOG.md are at the root, where GitHub looks for them. Links to and from them are rewritten.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
OUTSIDE = {"CONTRIBUTING.md": "contributing/index.md", "CHANGELOG.md": "changes.md"}
"""File at the root to its page."""

_LINK = re.compile(r"\]\(([^)#:]+)(#[^)]*)?\)")


def rewritten(text: str, source: str, page: str) -> str:
    """`text` with its links, which are relative to the file `source`, relative to `page` in the site."""

    def link(match: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(source), match[1]))
        if target in OUTSIDE:
            inside = OUTSIDE[target]
        elif target.startswith("docs/"):
            inside = target.removeprefix("docs/")
        else:
            return match[0]
        return f"]({posixpath.relpath(inside, posixpath.dirname(page) or '.')}{match[2] or ''})"

    return _LINK.sub(link, text)


def on_files(files: Any, config: Any) -> Any:
    from mkdocs.structure.files import File

    for source, page in OUTSIDE.items():
        text = (ROOT / source).read_text(encoding="utf-8")
        files.append(File.generated(config, page, content=rewritten(text, source, page)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    path = page.file.src_uri
    return markdown if path in OUTSIDE.values() else rewritten(markdown, f"docs/{path}", path)
