"""The GPU's libraries, read from disk before an engine asks for them: over a second of a machine's very first start.

A library that is not in memory comes by page faults: the process waits for each, the disk rests while the process
computes, and a fault brings a whole window of the disk's read-ahead, needed or not. With windows of 8 MiB the import of
torch with CUDA reads 890 MB and touches 240. So a process of its own (`page_reader.py`) reads, from the moment an
engine is started, what a start is known to touch, in the order in which it does. It looks before it reads: when
everything is in memory it is gone after some milliseconds.
"""

from __future__ import annotations

import contextlib
import glob
import os
import subprocess
import sys
import threading
from importlib import util

from millrace.host import page_reader

LIMIT_S = 30.0
_MB = 1 << 20
WHOLE = -1

LIBRARIES = (
    ("nvidia/*/lib/libcudart.so.*", 1, 1),
    ("nvidia/*/lib/libcublasLt.so.*", 8, 96),
    ("nvidia/*/lib/libcublas.so.*", 2, 2),
    ("nvidia/*/lib/libnvrtc.so.*", 80, 16),
    ("nvidia/*/lib/libcupti.so.*", 3, 3),
    ("nvidia/*/lib/libcufft.so.*", 5, 2),
    ("nvidia/*/lib/libcurand.so.*", 2, 2),
    ("nvidia/*/lib/libnvJitLink.so.*", 80, 16),
    ("nvidia/*/lib/libcusparse.so.*", 2, 2),
    ("nvidia/*/lib/libcusparseLt.so.*", 6, 8),
    ("nvidia/*/lib/libcusolver.so.*", 2, 2),
    ("nvidia/*/lib/libnccl.so.*", 2, 2),
    ("nvidia/*/lib/libnvshmem_host.so.*", 3, 3),
    ("nvidia/*/lib/libcufile.so.*", 3, 3),
    ("torch/lib/libc10*.so", 2, 2),
    ("torch/lib/libtorch_cpu.so", 116, 32),
    ("torch/lib/libtorch_cuda.so", 12, 16),
    ("torch/lib/libtorch_python.so", 16, 8),
    ("triton/_C/libtriton.so", 128, 64),
    ("triton/backends/nvidia/bin/ptxas", 32, 16),
    ("triton/_C/libtriton.so", WHOLE, 0),
)
"""What a start loads, in its order, with how many MB it touches of the beginning of the code and of each other section,
as seen with torch 2.11 and CUDA 13. Triton hashes the whole of its library for the keys of its cache. Numbers that are
wrong for another version cost time and nothing else."""


def read_libraries_ahead(package: str = "torch") -> threading.Thread | None:
    """Begin, for the libraries installed beside the package. Returns what waits for the end; nobody has to."""
    spec = util.find_spec(package)
    if spec is None or not spec.origin:
        return None
    folder = os.path.dirname(os.path.dirname(spec.origin))
    reading = threading.Thread(target=_read_beside, args=(folder,), name="libraries-ahead", daemon=True)
    reading.start()
    return reading


def _wishes(folder: str) -> list[str]:
    """What `page_reader.py` takes as arguments."""
    wishes = []
    for pattern, code_mb, data_mb in LIBRARIES:
        code_bytes = WHOLE if code_mb == WHOLE else code_mb * _MB
        for path in sorted(glob.glob(os.path.join(glob.escape(folder), pattern))):
            wishes += [str(code_bytes), str(data_mb * _MB), path]
    return wishes


def _read_beside(folder: str) -> None:
    """Whatever goes wrong, the libraries come when they are asked for."""
    quiet, command = subprocess.DEVNULL, [sys.executable, "-I", "-S", page_reader.__file__, *_wishes(folder)]
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        subprocess.run(command, stdin=quiet, stdout=quiet, stderr=quiet, timeout=LIMIT_S, check=False)
