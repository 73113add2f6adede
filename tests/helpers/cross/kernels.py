"""Compiles the C++ kernels for ARM and calls their functions in qemu's user mode, with torch tensors as arguments."""

from __future__ import annotations

import hashlib
import shutil
import struct
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType

import torch

from millrace.ops.cpp.native import FLAGS, SOURCES
from millrace.ops.cpp.targets import Target

COMPILER, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"
LIBRARIES = "/usr/aarch64-linux-gnu"
CALLER = Path(__file__).with_name("call_kernels.cpp")

Argument = torch.Tensor | int | float


def missing_tools() -> str:
    """Why ARM kernels cannot be tested here; empty if they can."""
    missing = [name for name in (COMPILER, EMULATOR) if shutil.which(name) is None]
    packages = "Debian: apt-get install g++-aarch64-linux-gnu qemu-user"
    return f"needs {' and '.join(missing)} ({packages})" if missing else ""


def build(target: Target, folder: Path, only: Sequence[str] = ()) -> tuple[Path, Path]:
    """The program that calls kernels, and the kernels, compiled in `folder` unless they exist. `only`: the files and
    folders of the sources that are needed; all if empty."""
    digest = hashlib.sha256(repr((target, FLAGS, only)).encode())
    for source in sorted([CALLER, *SOURCES.rglob("*.cpp"), *SOURCES.rglob("*.h")]):
        digest.update(source.read_bytes())
    name = f"{target.name}-{digest.hexdigest()[:16]}"
    caller, kernels = folder / f"call-{name}", folder / f"kernels-{name}.so"
    if kernels.exists() and caller.exists():
        return caller, kernels
    for old in folder.glob(f"*-{target.name}-*"):
        old.unlink()
    flags = [flag for flag in FLAGS if not flag.startswith("-march")] + list(target.flags)
    sources = [path for path in SOURCES.rglob("*.cpp") if not only or path.relative_to(SOURCES).parts[0] in only]
    objects = [folder / f"{target.name}-{source.stem}.o" for source in sources]
    with ThreadPoolExecutor(2) as pool:
        commands = [
            [COMPILER, *flags, "-I", str(SOURCES), "-c", str(source), "-o", str(built)]
            for source, built in zip(sources, objects, strict=True)
        ]
        list(pool.map(_run, [*commands, [COMPILER, "-O1", "-std=c++20", str(CALLER), "-ldl", "-o", str(caller)]]))
    _run([COMPILER, "-shared", "-pthread", *map(str, objects), "-o", str(kernels)])
    for built in objects:
        built.unlink()
    return caller, kernels


def _run(command: Sequence[str]) -> None:
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


class EmulatedKernels:
    """Tensors are copied to the emulated process before a call, and back after it."""

    def __init__(self, caller: Path, kernels: Path, processor: str) -> None:
        self._process = subprocess.Popen(
            [EMULATOR, "-cpu", processor, "-L", LIBRARIES, str(caller), str(kernels)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self._num_kept = 0

    def __enter__(self) -> EmulatedKernels:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(60)

    def call(self, name: str, *arguments: Argument) -> int:
        """Call `millrace_<name>`. Integers and tensors in their order; floats are passed apart from them."""
        tensors = [argument for argument in arguments if isinstance(argument, torch.Tensor)]
        numbers = {id(tensor): 1000 + at for at, tensor in enumerate(tensors)}
        for tensor in tensors:
            self._put(numbers[id(tensor)], _bytes(tensor))
        words = [
            (1, numbers[id(argument)]) if isinstance(argument, torch.Tensor) else (0, int(argument))
            for argument in arguments
            if not isinstance(argument, float)
        ]
        result = self._call(name, words, [argument for argument in arguments if isinstance(argument, float)])
        for tensor in tensors:
            self._write(b"R" + struct.pack("q", numbers[id(tensor)]))
            data = self._read(tensor.nbytes)
            tensor.view(torch.uint8).copy_(
                torch.frombuffer(bytearray(data), dtype=torch.uint8).view_as(tensor.view(torch.uint8))
            )
        return result

    def linear_desc(
        self,
        parts: Sequence[tuple[int, int, torch.Tensor]],
        num_inputs: int,
        dtype: int,
        bias: torch.Tensor | None = None,
        order: int = 0,
    ) -> int:
        """A LinearDesc (linear/linear.h) of parts (format, outputs, packed weight). Returns its number, for
        `linear`."""
        array = b"".join(struct.pack("qqii", 0, count, code, order) for code, count, _ in parts)
        packed = self._keep(array)
        for at, (_, _, tensor) in enumerate(parts):
            self._point(packed, 24 * at, self._keep(_bytes(tensor)))
        outputs = sum(count for _, count, _ in parts)
        desc = self._keep(struct.pack("qqqqqii", 0, 0, len(parts), outputs, num_inputs, dtype, 0))
        self._point(desc, 0, packed)
        if bias is not None:
            self._point(desc, 8, self._keep(_bytes(bias)))
        return desc

    def linear(self, desc: int, x: torch.Tensor, outputs: int) -> torch.Tensor:
        out = torch.empty(x.shape[0], outputs, dtype=x.dtype)
        self._put(1000, _bytes(x))
        self._put(1001, _bytes(out))
        words = [(1, desc), (1, 1000), (0, x.shape[1]), (1, 1001), (0, x.shape[0]), (0, 0), (0, 0)]
        self._call("linear", words, [])
        self._write(b"R" + struct.pack("q", 1001))
        return torch.frombuffer(bytearray(self._read(out.nbytes)), dtype=out.dtype).view_as(out)

    def take_rows(self, desc: int, ids: torch.Tensor, out: torch.Tensor) -> int:
        self._put(1000, _bytes(ids))
        self._put(1001, _bytes(out))
        result = self._call("take_rows", [(1, desc), (1, 1001), (1, 1000), (0, len(ids))], [])
        self._write(b"R" + struct.pack("q", 1001))
        out.copy_(torch.frombuffer(bytearray(self._read(out.nbytes)), dtype=out.dtype).view_as(out))
        return result

    # -- the protocol of call_kernels.cpp ----------------------------------------------------------------------------

    def _call(self, name: str, words: Sequence[tuple[int, int]], floats: Sequence[float]) -> int:
        symbol = f"millrace_{name}".encode()
        command = b"C" + struct.pack("q", len(symbol)) + symbol + struct.pack("q", len(words))
        command += b"".join(struct.pack("qq", *word) for word in words)
        self._write(command + struct.pack(f"q{len(floats)}f", len(floats), *floats))
        return int(struct.unpack("q", self._read(8))[0])

    def _keep(self, data: bytes) -> int:
        """A buffer that lasts."""
        self._num_kept += 1
        number = 10_000 + self._num_kept
        self._put(number, data)
        return number

    def _put(self, number: int, data: bytes) -> None:
        self._write(b"B" + struct.pack("qq", number, len(data)) + data)

    def _point(self, number: int, offset: int, target: int) -> None:
        self._write(b"P" + struct.pack("qqq", number, offset, target))

    def _write(self, data: bytes) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(data)
        self._process.stdin.flush()

    def _read(self, size: int) -> bytes:
        assert self._process.stdout is not None
        data = self._process.stdout.read(size)
        assert len(data) == size, "the emulated program failed; its message is above"
        return data


def _bytes(tensor: torch.Tensor) -> bytes:
    assert tensor.is_contiguous()
    return tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
