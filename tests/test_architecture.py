"""Rules about the tree that import-linter's contracts in pyproject.toml cannot express."""

from __future__ import annotations

import ast
import graphlib
import re
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grimp
import pytest

ROOT = Path(__file__).parents[1] / "millrace"
MAX_FILES_PER_ROOM = 18


@pytest.fixture(scope="module")
def graph() -> grimp.ImportGraph:
    """Every import of the package, including those inside functions and under TYPE_CHECKING."""
    return grimp.build_graph("millrace", cache_dir=None)


def find_circle(graph: grimp.ImportGraph) -> list[str]:
    """One chain of modules that ends where it starts, or nothing."""
    edges = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    try:
        graphlib.TopologicalSorter(edges).prepare()
    except graphlib.CycleError as error:
        return list(error.args[1])
    return []


def test_no_import_circle(graph: grimp.ImportGraph) -> None:
    circle = find_circle(graph)
    assert not circle, " <- ".join(circle)


@pytest.mark.parametrize("importer", ["import toy.b", "def f():\n    from toy import b"])
def test_import_circle_is_found_at_module_and_function_level(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, importer: str
) -> None:
    package = tmp_path / "toy"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "a.py").write_text(importer)
    (package / "b.py").write_text("from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from toy.a import x\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert set(find_circle(grimp.build_graph("toy", cache_dir=None))) == {"toy.a", "toy.b"}


def test_no_folder_has_too_many_files() -> None:
    num_files = Counter(file.parent for file in ROOT.rglob("*.py"))
    too_large = {str(room.relative_to(ROOT)): count for room, count in num_files.items() if count > MAX_FILES_PER_ROOM}
    assert not too_large, f"more than {MAX_FILES_PER_ROOM} files; make sub-rooms: {too_large}"


def contract_modules(contract: dict[str, Any]) -> Iterator[str]:
    """Every module that an import-linter contract names. Layers are relative to their containers."""
    for key in ("source_modules", "forbidden_modules", "modules", "containers"):
        yield from contract.get(key, [])
    for ignored in contract.get("ignore_imports", []):
        yield from (side.strip() for side in ignored.split("->"))
    for layer in contract.get("layers", []):
        for name in (part.strip(" ()") for part in re.split(r"[|:]", layer)):
            containers = contract.get("containers")
            yield from (f"{container}.{name}" for container in containers) if containers else (name,)


def test_import_contracts_name_only_modules_that_exist(graph: grimp.ImportGraph) -> None:
    settings = tomllib.loads((ROOT.parent / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"]
    for contract in settings["contracts"]:
        ours = {name for name in contract_modules(contract) if name.partition(".")[0] == "millrace" and "*" not in name}
        assert not ours - graph.modules, contract["name"]


def modules(room: str) -> list[Path]:
    return sorted((ROOT / room).rglob("*.py"))


def imported(file: Path) -> Iterator[str]:
    """Every dotted name that the file imports, anywhere in it."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or ""


def test_plan_imports_only_allowed_modules() -> None:
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
        # supervise/engine_process.py sets the wait policy of OpenMP, which can only be set through the environment.
        if file not in (ROOT / "config" / "environment.py", ROOT / "supervise" / "engine_process.py"):
            text = file.read_text(encoding="utf-8")
            assert "os.environ" not in text, f"{file} reads the environment"
            assert "getenv" not in text, f"{file} reads the environment"


@pytest.mark.live
def test_rooms_run_without_torch() -> None:
    """Imports every module of the rooms in a fresh interpreter, so that indirect imports count."""
    rooms = ("plan", "link", "sources", "text", "observe", "serve")
    files = [file.relative_to(ROOT.parent).with_suffix("") for room in rooms for file in modules(room)]
    names = [".".join(file.parts).removesuffix(".__init__") for file in files]
    code = f"""
import importlib, sys
for name in {names!r}:
    importlib.import_module(name)
    if "torch" in sys.modules:
        sys.exit(name + " imports torch")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


def test_imports_are_absolute() -> None:
    for file in ROOT.rglob("*.py"):
        found = re.search(r"^\s*from \..*", file.read_text(encoding="utf-8"), re.MULTILINE)
        assert not found, f"{file}: {found[0]}"


def test_weights_are_never_unpickled() -> None:
    unpicklers = {"pickle", "cPickle", "dill", "joblib"}
    for file in ROOT.rglob("*.py"):
        text = file.read_text(encoding="utf-8")
        if any(name in text for name in unpicklers):  # Parsing every file takes seconds.
            assert not unpicklers & set(imported(file)), f"{file} can unpickle"
        for call in re.findall(r"torch\.load\(.*", text):
            assert "weights_only=True" in call, f"{file} can unpickle"


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


KINDS = {"cpu", "cuda"}
KIND_NAMES = re.compile(r"is_(gpu|cuda|cpu)|device_kind|(\w+_)?(CPU|CUDA|GPU)(_\w+)?|CpuDevice|CudaDevice")


def kind_questions(source: str) -> Iterator[int]:
    """Lines that ask what kind a device is, or that have something for one kind."""
    for node in ast.walk(ast.parse(source)):
        line = getattr(node, "lineno", 0)
        if isinstance(node, ast.Compare | ast.Dict | ast.MatchValue):
            parts = ast.walk(node)
            if any(isinstance(part, ast.Constant) and part.value in KINDS for part in parts):
                yield line
        elif isinstance(node, ast.Attribute) and node.attr in ("kind", "type") and "device" in ast.unparse(node.value):
            yield line
        else:
            names = [getattr(node, field, None) for field in ("id", "attr", "arg", "name")]
            if any(isinstance(name, str) and KIND_NAMES.fullmatch(name) for name in names):
                yield line


def test_the_engine_asks_no_device_for_its_kind() -> None:
    """It asks for `DeviceDefaults` and `RunnerFacts`."""
    found = [
        f"{file.relative_to(ROOT)}:{line}"
        for file in sorted((ROOT / "engine").rglob("*.py"))
        for line in kind_questions(file.read_text(encoding="utf-8"))
    ]
    assert not found, found


@pytest.mark.parametrize(
    "source",
    [
        "x = device.kind",
        "x = self._device.torch_device.type",
        'if kind == "cuda": pass',
        'if kind in ("cpu", "mps"): pass',
        'STEPS = {"cpu": 200.0}',
        "def f(*, is_gpu): pass",
        "make(device_kind=1)",
        "CUDA_BUDGET = 1",
        "from millrace.run.device.device import CudaDevice",
    ],
)
def test_questions_for_the_kind_are_found(source: str) -> None:
    assert list(kind_questions(source))


def test_other_kinds_are_no_questions() -> None:
    assert not list(kind_questions('if query.kind == "steps": run(device.defaults, "cpu time")'))
