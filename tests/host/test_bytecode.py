"""An installation without bytecode is compiled once, not at every start."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from millrace.host import bytecode

pytestmark = pytest.mark.live


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package without bytecode, as in a container image."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    directory = tmp_path / "site" / "heavy_library"
    (directory / "testing").mkdir(parents=True)
    for name in ("__init__.py", "part.py", "testing/__init__.py"):
        (directory / name).write_text("value = 1\n")
    return directory


def environment(**changes: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPYCACHEPREFIX"}
    return {**kept, "PYTHONPATH": os.pathsep.join(sys.path), **changes}


def compiled(root: Path) -> list[str]:
    return sorted(path.name.split(".")[0] for path in root.rglob("*.pyc") if "heavy_library" in str(path))


def test_bytecode_is_kept_in_our_cache(package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bytecode, "MIN_CORES_TO_COMPILE", 1 << 10)
    settings = environment(PYTHONDONTWRITEBYTECODE="1")
    assert bytecode.keep_bytecode(settings, "heavy_library") is None
    subprocess.run([sys.executable, "-c", "import heavy_library.part"], env=settings, check=True, timeout=60)
    assert compiled(tmp_path / "cache" / "millrace" / "bytecode") == ["__init__", "part"]
    assert not compiled(package)


def test_first_start_with_many_cores_compiles_ahead(
    package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bytecode, "MIN_CORES_TO_COMPILE", 1)
    settings = environment(PYTHONDONTWRITEBYTECODE="1")
    compiling = bytecode.keep_bytecode(settings, "heavy_library")
    assert compiling is not None
    compiling.join(60)
    kept = tmp_path / "cache" / "millrace" / "bytecode"
    assert compiled(kept) == ["__init__", "part"], "rarely imported modules are not compiled"
    assert bytecode.keep_bytecode(environment(PYTHONDONTWRITEBYTECODE="1"), "heavy_library") is None


@pytest.mark.parametrize("changes", [{}, {"PYTHONDONTWRITEBYTECODE": "1", "PYTHONPYCACHEPREFIX": "/elsewhere"}])
def test_nothing_changes_if_python_writes_bytecode_itself(package: Path, changes: dict[str, str]) -> None:
    settings = environment(**changes)
    settings = {name: value for name, value in settings.items() if name in changes or "BYTECODE" not in name}
    before = dict(settings)
    assert bytecode.keep_bytecode(settings, "heavy_library") is None
    assert settings == before


def test_missing_package_changes_nothing() -> None:
    settings = environment(PYTHONDONTWRITEBYTECODE="1")
    assert bytecode.keep_bytecode(settings, "no_such_library") is None
    assert settings == environment(PYTHONDONTWRITEBYTECODE="1")
