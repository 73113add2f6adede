"""Compiles the C++ kernels for this machine on first use, keeps them in the user's cache, and calls them.

They have helper threads of their own, as many as torch uses, which sleep when there is nothing to do. Where there is no
compiler, the torch versions of the ops are used and `millrace ops` says so.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from ctypes import c_float, c_int, c_int32, c_int64, c_void_p
from pathlib import Path
from typing import Any, Final

import torch

from millrace.config import cache_dir

SOURCES: Final = Path(__file__).parent / "cpp"
FLAGS: Final = (
    "-O2",
    "-march=native",
    "-std=c++20",
    "-fPIC",
    "-pthread",
    "-Wno-psabi",
    "-fno-math-errno",
    "-ffp-contract=off",
)
COMPILERS: Final = ("g++", "c++", "clang++")
COMPILE_LIMIT_S: Final = 120
KEPT_OBJECTS: Final = 8

DTYPES: Final = {torch.float32: 0, torch.bfloat16: 1}
"""Numbers of the dtypes in the kernels; the same as in cpp/vec.h."""
KV_DTYPES: Final = {**DTYPES, torch.int8: 2}
"""The same for the items of a cache."""
QUICK_ROWS: Final = 64
"""Up to so many rows an elementwise call is so short that letting the interpreter lock go costs more than it gives."""


class LinearPart(ctypes.Structure):
    """Outputs of a linear layer that are packed together; the same as in cpp/linear/linear.h."""

    _fields_ = (("packed", c_void_p), ("n", c_int64), ("format", c_int32), ("unused", c_int32))


class LinearDesc(ctypes.Structure):
    """A linear layer as in cpp/linear/linear.h. Its maker keeps alive what it points to."""

    _fields_ = (
        ("parts", ctypes.POINTER(LinearPart)),
        ("bias", c_void_p),
        ("num_parts", c_int64),
        ("n", c_int64),
        ("k", c_int64),
        ("dtype", c_int32),
        ("unused", c_int32),
    )


_SIGNATURES: Final[dict[str, tuple[Any, tuple[Any, ...]]]] = {
    "set_threads": (None, (c_int,)),
    "has_amx": (c_int, ()),
    "padded_inputs": (c_int64, (c_int, c_int64)),
    "pack": (None, (c_int, c_void_p, c_void_p, c_int64, c_int64)),
    "take_rows": (c_int64, (c_void_p, c_void_p, c_void_p, c_int64)),
    "quantised_bytes": (c_int64, (c_int, c_int64, c_int64)),
    "quantised_pack": (None, (c_int, c_void_p, c_void_p, c_int64, c_int64)),
    "linear": (None, (c_void_p, c_void_p, c_int64, c_void_p, c_int64, c_int, c_int)),
    "decodes_apart": (c_int, (c_void_p,)),
    "gated_mlp": (c_int, (c_void_p, c_void_p, c_int, c_void_p, c_int64, c_void_p, c_int64)),
    "norm": (None, (c_int, *[c_void_p] * 5, c_int64, c_int64, c_float)),
    "gated": (None, (c_int, c_int, c_void_p, c_void_p, c_int64, c_int64)),
    "prepare_qkv": (None, (c_int, c_int, *[c_void_p] * 7, *[c_int64] * 7, c_float)),
    "attention": (
        None,
        (c_int, c_int, c_void_p, c_int64, *[c_void_p] * 5, *[c_int64] * 8, c_float, c_float),
    ),
    "tiles_spared": (c_int64, (*[c_void_p] * 3, *[c_int64] * 3)),
    "draw": (None, (c_void_p, c_int64, c_int64, *[c_void_p] * 6)),
    "stack_new": (c_void_p, (c_void_p, c_void_p, c_void_p)),
    "stack_free": (None, (c_void_p,)),
    "stack_run": (c_int, (c_void_p, c_void_p)),
    "stack_step": (c_int, (c_void_p, c_void_p)),
}


class NativeUnavailable(Exception):
    """The kernels cannot be had here; the message is a clause that says why."""


class Native:
    """The kernels as functions. `quick` holds the interpreter lock during a call; `slow` lets it go, so that the next
    step can be planned meanwhile."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.quick = _bind(ctypes.PyDLL(str(path)))
        self.slow = _bind(ctypes.CDLL(str(path)))

    def for_rows(self, rows: int) -> Any:
        return self.quick if rows <= QUICK_ROWS else self.slow


class _Functions:
    """A namespace of bound functions."""


def _bind(library: ctypes.CDLL) -> Any:
    functions = _Functions()
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(library, f"millrace_{name}")
        function.restype = result
        function.argtypes = list(arguments)
        setattr(functions, name, function)
    return functions


def native() -> Native:
    """The kernels, compiled now if the cache has none for this machine. Raises NativeUnavailable.

    From here on they use as many threads as torch does at this moment."""
    found = _native_or_reason()
    if isinstance(found, str):
        raise NativeUnavailable(found)
    found.quick.set_threads(torch.get_num_threads())
    return found


def native_missing(device: torch.device) -> str:
    """Why the kernels cannot be had, as a clause; empty when they can."""
    found = _native_or_reason()
    return found if isinstance(found, str) else ""


@functools.cache
def _native_or_reason() -> Native | str:
    try:
        return Native(build(cache_dir() / "native"))
    except NativeUnavailable as reason:
        return str(reason)
    except OSError as error:
        return f"needs its compiled kernels, which could not be kept or loaded: {error}"


# --- building ---


def build(folder: Path, compilers: tuple[str, ...] = COMPILERS) -> Path:
    """The shared object in `folder`, compiled unless it is there already."""
    compiler = next((found for found in map(shutil.which, compilers) if found), None)
    if compiler is None:
        raise NativeUnavailable(f"needs a C++ compiler ({', '.join(compilers)}); none is installed")
    sources = sorted(SOURCES.rglob("*.cpp"))
    path = folder / f"kernels-{_fingerprint(compiler)}.so"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            os.replace(_compile(compiler, sources, Path(scratch)), path)
        _prune(folder)
    return path


def _prune(folder: Path) -> None:
    """Keep the newest few: each change of compiler, sources or processor leaves one behind."""
    objects = sorted(folder.glob("kernels-*.so"), key=lambda path: path.stat().st_mtime, reverse=True)
    for path in objects[KEPT_OBJECTS:]:
        path.unlink(missing_ok=True)


def _fingerprint(compiler: str) -> str:
    """Changes with the sources, the flags, the compiler and what the processor can do."""
    digest = hashlib.sha256()
    for source in sorted(SOURCES.rglob("*")):
        if source.suffix in (".cpp", ".h"):
            digest.update(source.read_bytes())
    status = os.stat(compiler)
    facts = (FLAGS, os.path.realpath(compiler), status.st_size, status.st_mtime_ns, platform.machine(), _processor())
    digest.update(repr(facts).encode())
    return digest.hexdigest()[:20]


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")


def _compile(compiler: str, sources: list[Path], scratch: Path) -> Path:
    objects = [scratch / f"{source.stem}.o" for source in sources]
    running = [
        subprocess.Popen(
            [compiler, *FLAGS, "-I", str(SOURCES), "-c", str(source), "-o", str(target)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        )
        for source, target in zip(sources, objects, strict=True)
    ]
    try:
        for process in running:
            _check(process.wait(COMPILE_LIMIT_S), process.communicate()[1], compiler)
    except subprocess.TimeoutExpired as error:
        raise NativeUnavailable(f"needs kernels that {compiler} did not compile in {COMPILE_LIMIT_S} s") from error
    finally:
        for process in running:
            process.kill()
            process.wait()
    target = scratch / "kernels.so"
    link = [compiler, "-shared", "-pthread", *map(str, objects), "-o", str(target)]
    linked = subprocess.run(link, check=False, capture_output=True, timeout=COMPILE_LIMIT_S)
    _check(linked.returncode, linked.stderr, compiler)
    return target


def _check(code: int, errors: bytes, compiler: str) -> None:
    if code:
        first = next(iter(errors.decode(errors="replace").splitlines()), f"exit status {code}")
        raise NativeUnavailable(f"needs kernels that {compiler} could not compile: {first}")


def main() -> None:
    """Compile the kernels ahead of their first use."""
    found = _native_or_reason()
    print(f"   not there: {found}; torch's operations are used" if isinstance(found, str) else "   ready")


if __name__ == "__main__":
    main()
