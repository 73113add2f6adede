"""A wheel must contain everything that the package reads at run time."""

from __future__ import annotations

import tomllib
from fnmatch import fnmatch
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_package_data_covers_every_file_that_is_not_python() -> None:
    setuptools = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]
    # Folders without an __init__.py (C++ sources, measured tables) are packages only while this is on.
    assert setuptools["packages"]["find"].get("namespaces", True)
    patterns = setuptools["package-data"]["*"]
    files = [path for path in (ROOT / "millrace").rglob("*") if path.is_file() and path.suffix not in (".py", ".pyc")]
    assert {".cpp", ".h", ".html", ".json"} <= {path.suffix for path in files}
    missing = [path.name for path in files if not any(fnmatch(path.name, pattern) for pattern in patterns)]
    assert not missing
