"""The walls of the house, where import-linter's contracts (pyproject.toml) cannot say it exactly enough."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1] / "millrace"


def modules(room: str) -> list[Path]:
    return sorted((ROOT / room).rglob("*.py"))


def imported(file: Path) -> Iterator[str]:
    """Every dotted name that the file imports, anywhere in it."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file} imports relatively"
            yield node.module or ""


def test_plan_imports_only_what_it_may() -> None:
    allowed = ("millrace.plan", "millrace.config", "millrace.errors", "millrace.params", "numpy")
    for file in modules("plan"):
        for name in imported(file):
            ours = any(name == root or name.startswith(root + ".") for root in allowed)
            assert ours or name.partition(".")[0] in sys.stdlib_module_names, f"{file.name} imports {name}"


def test_plan_reads_no_clock_and_draws_no_randomness() -> None:
    forbidden = {"time", "datetime", "random", "secrets", "uuid", "numpy.random"}
    for file in modules("plan"):
        assert not forbidden & set(imported(file)), f"{file.name} is not pure"
        assert "np.random" not in file.read_text(encoding="utf-8"), f"{file.name} is not pure"


def test_only_config_reads_the_environment() -> None:
    for file in ROOT.rglob("*.py"):
        # supervise/engine_process.py hands OpenMP its waiting policy, which can only be said through the environment.
        if file not in (ROOT / "config.py", ROOT / "engine" / "process.py"):
            text = file.read_text(encoding="utf-8")
            assert "os.environ" not in text, f"{file} reads the environment"
            assert "getenv" not in text, f"{file} reads the environment"


@pytest.mark.parametrize("room", ["text", "link", "observe", "sources", "serve", "plan"])
def test_room_runs_without_torch(room: str) -> None:
    """As imported for real, with everything that its imports import."""
    names = [".".join(file.relative_to(ROOT.parent).with_suffix("").parts) for file in modules(room)]
    names = [name.removesuffix(".__init__") for name in names]
    code = f"import importlib, sys\nfor n in {names!r}: importlib.import_module(n)\nsys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr or f"{room} imports torch"


def test_weights_are_never_unpickled() -> None:
    for file in ROOT.rglob("*.py"):
        assert not {"pickle", "cPickle", "dill", "joblib"} & set(imported(file)), f"{file} can unpickle"
        assert "torch.load(" not in file.read_text(encoding="utf-8"), f"{file} can unpickle"


def test_documentation_names_only_files_that_exist() -> None:
    top = ROOT.parent
    for page in [*top.glob("*.md"), *(top / "docs").glob("*.md")]:
        text = page.read_text(encoding="utf-8")
        for name in re.findall(r"`([a-z_]+/[a-z_/]+\.py)`", text):
            assert (ROOT / name).is_file() or (top / name).is_file(), f"{page.name} names {name}"
        for link in re.findall(r"\]\(([^)#:]+)\)", text):
            assert (page.parent / link).exists(), f"{page.name} links to {link}"


def test_requirements_are_exact_and_leave_torch_alone() -> None:
    for name in ("requirements.txt", "requirements-dev.txt"):
        lines = [line.partition("#")[0].strip() for line in (ROOT.parent / name).read_text().splitlines()]
        wanted = [line for line in lines if line and not line.startswith("-r ")]
        assert all("==" in line for line in wanted)
        assert not any(line.startswith("torch") for line in wanted)
