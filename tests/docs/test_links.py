"""Every link in the documentation leads somewhere, and every page can be found in the site."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from helpers.pages import PAGES, ROOT, links, name_of, slugs

NAV = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:\n")[2]


def broken(page: Path, root: Path = ROOT) -> list[str]:
    """Links of a page to files or headings that do not exist."""
    text = page.read_text(encoding="utf-8")
    found = []
    for link in links(text):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path) if path else page
        # GitHub lists a folder, but a site has no page for it.
        is_kind = target.exists() if page.parent == root else target.is_file()
        is_there = is_kind and target.resolve().is_relative_to(root.resolve())
        if not is_there or (anchor and anchor not in slugs(target.read_text(encoding="utf-8"))):
            found.append(link)
    return found


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page: Path) -> None:
    assert broken(page) == []


def test_broken_links_are_found(tmp_path: Path) -> None:
    (tmp_path / "docs" / "folder").mkdir(parents=True)
    (tmp_path / "docs" / "other.md").write_text("# A heading, and `code`\n")
    page = tmp_path / "docs" / "page.md"
    page.write_text(
        "[good](other.md) [good](other.md#a-heading-and-code) `[no](link.md)`\n"
        "[bad](none.md) [bad](other.md#none) [bad](folder) [bad](../../outside.md)\n"
    )
    assert broken(page, tmp_path) == ["none.md", "other.md#none", "folder", "../../outside.md"]


def test_every_page_is_in_the_navigation_once() -> None:
    entries = re.findall(r"^ *- (?:[^:\n]+: )?(\S+\.md)$", NAV, re.MULTILINE)
    written = [name_of(page).removeprefix("docs/") for page in PAGES if name_of(page).startswith("docs/")]
    from_root = ["changes.md", "contributing/index.md"]
    assert sorted(entries) == sorted([*written, *from_root]), "mkdocs.yml lists the pages of the site"


@pytest.mark.live
@pytest.mark.skipif(find_spec("mkdocs") is None, reason="mkdocs is not installed (requirements-docs.txt)")
class TestSite:
    def build(self, root: Path, site: Path) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-d", str(site)]
        return subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=240, check=False)

    def test_it_builds_and_loads_nothing_from_elsewhere(self, tmp_path: Path) -> None:
        result = self.build(ROOT, tmp_path / "site")
        assert result.returncode == 0, result.stderr
        home = (tmp_path / "site" / "index.html").read_text(encoding="utf-8")
        assert re.findall(r"<(?:script|img)[^>]+src=\"https?:[^\"]*|<link[^>]+stylesheet[^>]+https?:", home) == []

    def test_a_broken_link_fails(self, tmp_path: Path) -> None:
        for name in ("docs", "tools"):
            shutil.copytree(ROOT / name, tmp_path / name)
        for name in ("mkdocs.yml", "CONTRIBUTING.md", "CHANGELOG.md"):
            shutil.copy(ROOT / name, tmp_path)
        with (tmp_path / "docs" / "web.md").open("a", encoding="utf-8") as page:
            page.write("\n[broken](nowhere.md)\n")
        result = self.build(tmp_path, tmp_path / "site")
        assert result.returncode != 0
        assert "nowhere.md" in result.stderr
