"""Finds the C++ kernels for this machine and binds their functions.

A wheel contains kernels for common processors (`targets.py`). Otherwise they are compiled on first use and cached. What
was compiled for this very processor comes first. The kernels have their own thread pool, as large as torch's; idle
threads sleep. Without a compiler and without prebuilt kernels the torch versions of the ops are used. `millrace ops`
says which. `python -m millrace.ops.cpp.native` compiles ahead of time.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from ctypes import c_char_p, c_float, c_int, c_int32, c_int64, c_void_p
from pathlib import Path
from typing import Any, Final

import torch

from millrace.config import cache_dir
from millrace.ops.cpp.targets import prebuilt_target, processor_features

log = logging.getLogger(__name__)

SOURCES: Final = Path(__file__).parent
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
COMPILE_TIMEOUT_S: Final = 300
MAX_CACHED_OBJECTS: Final = 8

DTYPES: Final = {torch.float32: 0, torch.bfloat16: 1}
"""Codes of the dtypes in the kernels; the same as in vec.h."""
KV_DTYPES: Final = {**DTYPES, torch.int8: 2, torch.float16: 3, torch.int32: 4}
"""Codes of the dtypes of a KV cache; float16 is for float32 models, int32 holds four-bit numbers."""
MAX_ROWS_WITH_GIL: Final = 64
"""Up to this many rows an elementwise call keeps the GIL: it is too short for releasing it to pay off."""


class LinearPart(ctypes.Structure):
    """Consecutive outputs of a linear layer in one format; mirrors linear/linear.h."""

    _fields_ = (("packed", c_void_p), ("n", c_int64), ("format", c_int32), ("order", c_int32))


class LinearDesc(ctypes.Structure):
    """A linear layer; mirrors linear/linear.h. Its creator must keep the memory alive that it points to."""

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
    "int8_kernel": (c_char_p, ()),
    "padded_inputs": (c_int64, (c_int, c_int64)),
    "pack": (None, (c_int, c_void_p, c_void_p, c_int64, c_int64)),
    "take_rows": (c_int64, (c_void_p, c_void_p, c_void_p, c_int64)),
    "quantised_bytes": (c_int64, (c_int, c_int64, c_int64)),
    "quantised_pack": (None, (c_int, c_int, c_void_p, c_void_p, c_int64, c_int64)),
    "linear": (None, (c_void_p, c_void_p, c_int64, c_void_p, c_int64, c_int, c_int)),
    "has_decode_kernel": (c_int, (c_void_p,)),
    "gated_mlp": (c_int, (c_void_p, c_void_p, c_int, c_void_p, c_int64, c_void_p, c_int64)),
    "experts": (
        None,
        (c_int, c_void_p, c_void_p, c_int64, c_int, c_float, c_float, *[c_void_p] * 4, c_int64, c_int64),
    ),
    "per_head": (None, (c_void_p, c_int64, c_void_p, c_void_p, c_int64)),
    "norm": (None, (c_int, *[c_void_p] * 5, c_int64, c_int64, c_float)),
    "gated": (None, (c_int, c_int, c_void_p, c_void_p, c_int64, c_int64)),
    "prepare_qkv": (None, (c_int, c_int, *[c_void_p] * 8, *[c_int64] * 7, c_float)),
    "attention": (
        None,
        (c_int, c_int, c_void_p, c_int64, *[c_void_p] * 5, *[c_int64] * 8, c_float, c_float, c_void_p),
    ),
    "text_attention": (None, (*[c_void_p] * 4, *[c_int64] * 4, c_float)),
    "bias_activation": (None, (c_int, c_void_p, c_void_p, c_int64, c_int64)),
    "bias_layer_norm": (None, (*[c_void_p] * 4, c_int64, c_int64, c_float)),
    "latent_attention": (None, (c_int, c_int, *[c_void_p] * 6, *[c_int64] * 6, c_float)),
    "causal_conv": (None, (c_int, *[c_void_p] * 8, *[c_int64] * 5)),
    "recurrence": (None, (*[c_void_p] * 10, *[c_int64] * 6)),
    "tiles_saved": (c_int64, (*[c_void_p] * 3, *[c_int64] * 3)),
    "add_lora": (
        None,
        (c_int, c_void_p, c_int64, c_void_p, c_int64, c_int64, *[c_void_p] * 6, c_int64, c_int64),
    ),
    "draw": (None, (c_void_p, c_int64, c_int64, *[c_void_p] * 6)),
    "mask": (None, (c_void_p, c_int64, c_void_p, c_void_p, c_int64)),
    "stack_new": (c_void_p, (c_void_p, c_void_p, c_void_p)),
    "stack_set_draft": (None, (c_void_p, c_void_p)),
    "stack_free": (None, (c_void_p,)),
    "stack_run": (c_int, (c_void_p, c_void_p)),
    "stack_forward": (c_int, (c_void_p, c_void_p)),
    "stack_draw": (c_int, (c_void_p, c_void_p)),
    "stack_step": (c_int, (c_void_p, c_void_p, c_void_p)),
}


class NativeUnavailable(Exception):
    """The kernels cannot be compiled or loaded; the message is a clause that says why ("needs …")."""


class Native:
    """The kernels as functions. Calls through `with_gil` hold the GIL; calls through `without_gil` release it, so that
    the next step can be planned meanwhile."""

    def __init__(self, path: Path, origin: str = "compiled for this processor") -> None:
        self.path = path
        self.origin = origin
        """Where the kernels come from, as a clause."""
        self.with_gil = _bind(ctypes.PyDLL(str(path)))
        self.without_gil = _bind(ctypes.CDLL(str(path)))

    def for_rows(self, num_rows: int) -> Any:
        """The functions to use for an elementwise call on this many rows."""
        return self.with_gil if num_rows <= MAX_ROWS_WITH_GIL else self.without_gil


class _Functions:
    """Namespace of bound functions."""


def _bind(shared_object: ctypes.CDLL) -> Any:
    functions = _Functions()
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(shared_object, f"millrace_{name}")
        function.restype = result
        function.argtypes = list(arguments)
        setattr(functions, name, function)
    return functions


def native() -> Native:
    """The kernels, compiled now unless they are cached. Raises NativeUnavailable.

    Sets their number of threads to torch's current one."""
    found = native_or_reason()
    if isinstance(found, str):
        raise NativeUnavailable(found)
    found.with_gil.set_threads(torch.get_num_threads())
    return found


def native_missing(device: torch.device) -> str:
    """Why the kernels are unavailable, as a clause; empty if they are available."""
    found = native_or_reason()
    return found if isinstance(found, str) else ""


@functools.cache
def native_or_reason() -> Native | str:
    folder = cache_dir() / "native"
    try:
        return _prebuilt(folder) or Native(build(folder))
    except NativeUnavailable as reason:
        return str(reason)
    except OSError as error:
        return f"needs the compiled kernels, which could not be cached or loaded: {error}"


def avx512_missing(device: torch.device) -> str:
    """As `native_missing`, for kernels that only pay off with vectors of 16 numbers."""
    if "avx512f" not in processor_features():
        return "needs AVX-512, without which torch is faster"
    return native_missing(device)


def native_notes(device: torch.device) -> tuple[str, ...]:
    """What a user should know about the kernels of this device."""
    reason = native_missing(device) if device.type == "cpu" else ""
    if not reason:
        return ()
    return (f"The C++ kernels are not used: Millrace {reason}. Torch computes instead, several times slower.",)


def native_origin() -> str:
    """Which kernels are used and why, as a clause, for people."""
    found = native_or_reason()
    return f"none: {found}; torch is used instead" if isinstance(found, str) else found.origin


def has_fast_int8() -> bool:
    """True if there are kernels, and they multiply integers with instructions made for it."""
    found = native_or_reason()
    return isinstance(found, Native) and int8_kernel() != "portable"


def int8_kernel() -> str:
    """Name of the instructions that multiply integers."""
    return str(native().with_gil.int8_kernel().decode())


def _prebuilt(folder: Path) -> Native | None:
    """The wheel's kernels for this processor, unless there are none or some were compiled for it before."""
    target = prebuilt_target(processor_features())
    if target is None or _is_built(folder):
        return None
    try:
        return Native(target.path, f"prebuilt for {target.name} processors")
    except OSError as error:  # Such as a C library that is too old: compile instead.
        log.warning(
            "The prebuilt kernels %s cannot be loaded (%s); they are compiled instead.", target.path.name, error
        )
        return None


def _is_built(folder: Path) -> bool:
    compiler = _compiler(COMPILERS)
    return compiler is not None and _built_path(folder, compiler).exists()


# --- building ---


def build(folder: Path, compilers: tuple[str, ...] = COMPILERS) -> Path:
    """Path of the shared object in `folder`, compiled now unless it exists."""
    compiler = _compiler(compilers)
    if compiler is None:
        raise NativeUnavailable(f"needs a C++ compiler ({', '.join(compilers)}); none is installed")
    sources = sorted(SOURCES.rglob("*.cpp"))
    path = _built_path(folder, compiler)
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            os.replace(_compile(compiler, sources, Path(scratch)), path)
        _prune(folder)
    return path


def _compiler(names: tuple[str, ...]) -> str | None:
    return next((found for found in map(shutil.which, names) if found), None)


def _built_path(folder: Path, compiler: str) -> Path:
    return folder / f"kernels-{_fingerprint(compiler)}.so"


def _prune(folder: Path) -> None:
    """Delete all but the newest objects: each change of compiler, sources or processor adds one."""
    objects = sorted(folder.glob("kernels-*.so"), key=lambda path: path.stat().st_mtime, reverse=True)
    for path in objects[MAX_CACHED_OBJECTS:]:
        path.unlink(missing_ok=True)


def _fingerprint(compiler: str) -> str:
    """Hash of the sources, the flags, the compiler and the processor's features."""
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
    """One compiler per core at a time: more would only need more memory. The largest files first."""
    ordered = sorted(sources, key=lambda source: source.stat().st_size, reverse=True)
    objects = [scratch / "-".join(source.relative_to(SOURCES).with_suffix(".o").parts) for source in ordered]
    with ThreadPoolExecutor(len(os.sched_getaffinity(0)), thread_name_prefix="compile") as pool:
        done = [pool.submit(_compile_one, compiler, *pair) for pair in zip(ordered, objects, strict=True)]
        try:
            for future in done:
                future.result()
        except NativeUnavailable:
            pool.shutdown(cancel_futures=True)
            raise
    target = scratch / "kernels.so"
    link = [compiler, "-shared", "-pthread", *map(str, objects), "-o", str(target)]
    linked = subprocess.run(link, check=False, capture_output=True, timeout=COMPILE_TIMEOUT_S)
    _check(linked.returncode, linked.stderr, compiler)
    return target


def _compile_one(compiler: str, source: Path, target: Path) -> None:
    command = [compiler, *FLAGS, "-I", str(SOURCES), "-c", str(source), "-o", str(target)]
    try:
        result = subprocess.run(command, check=False, capture_output=True, timeout=COMPILE_TIMEOUT_S)
    except subprocess.TimeoutExpired as error:
        raise NativeUnavailable(
            f"needs kernels that {compiler} did not compile within {COMPILE_TIMEOUT_S} s"
        ) from error
    _check(result.returncode, result.stderr, compiler)


def _check(code: int, errors: bytes, compiler: str) -> None:
    if code:
        first = next(iter(errors.decode(errors="replace").splitlines()), f"exit status {code}")
        raise NativeUnavailable(f"needs kernels that {compiler} could not compile: {first}")


def main() -> None:
    """Compile the kernels before they are first used."""
    print(f"   {native_origin()}")


if __name__ == "__main__":
    main()
