"""Reads the CUDA libraries into the page cache while an engine starts: saves over a second after a reboot.

Without this they are loaded by page faults: the process waits for each, the disk idles while the process computes, and
each fault reads a whole read-ahead window. With 8 MiB windows, importing torch with CUDA reads 890 MB and touches 240.
A separate process (`page_reader.py`) therefore reads the parts that a start touches, in that order. It skips what is
already cached, so with everything in memory it ends after a few milliseconds.
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
"""Files in loading order; MB touched at the start of the code section and of each other section, as seen with torch
2.11 and CUDA 13. Triton hashes its whole library for its cache keys. Wrong numbers for other versions only cost
time."""


def read_libraries_ahead(package: str = "torch") -> threading.Thread | None:
    """Start reading the libraries installed next to `package`. Returns the thread that waits for the reader."""
    spec = util.find_spec(package)
    if spec is None or not spec.origin:
        return None
    folder = os.path.dirname(os.path.dirname(spec.origin))
    reading = threading.Thread(target=_read_beside, args=(folder,), name="libraries-ahead", daemon=True)
    reading.start()
    return reading


def _reader_arguments(folder: str) -> list[str]:
    """Arguments of `page_reader.py`: code bytes, data bytes and path for each file."""
    arguments = []
    for pattern, code_mb, data_mb in LIBRARIES:
        code_bytes = WHOLE if code_mb == WHOLE else code_mb * _MB
        for path in sorted(glob.glob(os.path.join(glob.escape(folder), pattern))):
            arguments += [str(code_bytes), str(data_mb * _MB), path]
    return arguments


def _read_beside(folder: str) -> None:
    """Errors do not matter: the libraries are then loaded by page faults."""
    quiet, command = subprocess.DEVNULL, [sys.executable, "-I", "-S", page_reader.__file__, *_reader_arguments(folder)]
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        subprocess.run(command, stdin=quiet, stdout=quiet, stderr=quiet, timeout=LIMIT_S, check=False)
