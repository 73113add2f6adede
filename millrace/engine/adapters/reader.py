"""Reads adapters in a process of its own, with a low priority, so that no step waits for it: neither for the
interpreter's lock nor for a core. The matrices come through a pipe, in small pieces."""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from millrace.engine.adapters.reader_child import LENGTH_BYTES
from millrace.errors import AdapterError
from millrace.host.children import end_of
from millrace.host.time_slice import request_default_slices
from millrace.models.adapters.files import Limits, Packed, PackedLinear
from millrace.models.adapters.read import Adapter, dtype_of, name_of, unpacked
from millrace.models.adapters.targets import AdapterTargets
from millrace.run.device.kv_pool import untouched_zeros

CHILD = "millrace.engine.adapters.reader_child"
LIMIT_S = 120.0
"""Without a byte from the process, it is ended."""
PIECE_BYTES = 1 << 18
HUGE_PAGE_BYTES = 1 << 21
"""Matrices of this size are read a fifth faster from huge pages, once for each step."""
MAX_HEADER_BYTES = 1 << 24
NAME = "the adapters' reader"


class AdapterReader:
    """Called by one thread at a time. Its process starts at once, and anew after one that has ended."""

    def __init__(
        self,
        targets: AdapterTargets,
        dtype: torch.dtype,
        limits: Limits,
        *,
        is_pinned: bool = False,
        limit_s: float = LIMIT_S,
    ) -> None:
        """`is_pinned`: into memory that a GPU copies from beside its steps."""
        linears = [None if linear is None else asdict(linear) for linear in targets.linears]
        self._settings = {"linears": linears, "dtype": name_of(dtype), **asdict(limits)}
        self._is_pinned = is_pinned
        self._limit_s = limit_s
        self._is_closed = False
        self.process = self._start()

    @property
    def pid(self) -> int:
        return self.process.pid

    def __call__(self, folder: Path) -> Adapter:
        """Raises AdapterError."""
        request_default_slices()  # Its thread is one of the engine's, which would be woken before those that compute.
        if self.process.poll() is not None and not self._is_closed:
            self._end()
            self.process = self._start()
        try:
            return self._read(folder)
        except (OSError, EOFError, TimeoutError) as error:
            self._end()
            if self._is_closed:
                raise AdapterError(f"{folder} was not read: the engine ends.") from error
            reason = str(error) or f"the process that reads adapters ended with exit code {self.process.returncode}"
            raise AdapterError(f"{folder} was not read: {reason}. Send a request for it again.") from error

    def _read(self, folder: Path) -> Adapter:
        self._send({"folder": str(folder)})
        size = int.from_bytes(self._exactly(LENGTH_BYTES), "little")
        if size > MAX_HEADER_BYTES:
            raise EOFError(f"it is described in {size:,} bytes, which are too many")
        header = json.loads(self._exactly(size))
        if "error" in header:
            raise AdapterError(header["error"])
        linears = tuple(
            PackedLinear(**one | {"ranks": tuple(one["ranks"]), "scales": tuple(one["scales"])})
            for one in header.pop("linears")
        )
        packed = Packed(linears=linears, **header)
        data = self._room(packed)
        self._receive(data.view(torch.uint8).numpy().data)
        return unpacked(packed, data, folder)

    def _room(self, packed: Packed) -> Tensor:
        count, dtype = packed.num_numbers, dtype_of(packed)
        if self._is_pinned or count * dtype.itemsize < HUGE_PAGE_BYTES:
            return torch.empty(count, dtype=dtype, pin_memory=self._is_pinned)
        return untouched_zeros((count,), dtype)

    def _send(self, message: dict[str, Any]) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(message).encode() + b"\n")
        self.process.stdin.flush()

    def _exactly(self, size: int) -> bytes:
        found = bytearray(size)
        self._receive(memoryview(found))
        return bytes(found)

    def _receive(self, into: memoryview) -> None:
        """In pieces, so that this thread never keeps the interpreter's lock for long."""
        stdout = self.process.stdout
        assert stdout is not None
        while into:
            if not select.select([stdout], [], [], self._limit_s)[0]:
                raise TimeoutError(f"the process that reads adapters has not answered for {self._limit_s:g} s")
            count = os.readv(stdout.fileno(), [into[:PIECE_BYTES]])
            if not count:
                raise EOFError
            into = into[count:]

    def _start(self) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            [sys.executable, "-m", CHILD],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C must reach only the front, which then drains.
        )
        self.process = process
        self._send(self._settings)
        return process

    def _end(self) -> None:
        process = self.process
        process.kill()
        end_of(process, NAME)
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()

    def close(self) -> None:
        """What is being read fails."""
        self._is_closed = True
        self.process.kill()
        end_of(self.process, NAME)
