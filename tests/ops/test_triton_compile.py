"""Kernels compiled ahead land in Triton's cache, and one that cannot be compiled does not stop the others.

What compiles runs in its own process, because Triton may be in interpreter mode here; no test needs a GPU."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from helpers import gpu_compiler
from helpers.fake_clock import FakeClock
from helpers.triton_mode import interpreted

from millrace.config import Config
from millrace.run.graphs import kernel_build_pool
from millrace.run.graphs.kernel_build_pool import KernelBuildPool, start_build_pool

NORM = {
    "name": "millrace.ops.triton.norm._norm_kernel",
    "signature": {
        **dict.fromkeys(("x_ptr", "residual_ptr", "out_ptr", "total_ptr"), "*bf16"),
        "weight_ptr": "*fp32", "rows": "i32", "dim": "i32", "x_stride": "i32", "eps": "fp32",
        **dict.fromkeys(("scale_ptr", "shares_ptr", "counters_ptr", "index_ptr"), "constexpr"),
        **dict.fromkeys(("ROWS", "BLOCK", "ADD", "QUANTISE"), "constexpr"),
        **dict.fromkeys(("CHOICES", "COUNTERS", "COUNTER_BLOCK", "PICK", "EARLY"), "constexpr"),
    },
    "constant_keys": [[5], [6], [7], [8], *([place] for place in range(13, 22))],
    "attrs_keys": [[0]],
    "attrs_vals": [[["tt.divisibility", 16]]],
    "options": {"num_warps": 4},
    "key": "",
}  # fmt: skip


def constants(block: int) -> list[object]:
    return [None, None, None, None, 1, block, True, False, 0, 0, 1, False, 0]


CHECK = """
import hashlib, json, sys
from triton._C.libtriton import get_cache_invalidating_env_vars
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime.cache import get_cache_key, get_cache_manager
from millrace.ops.triton import norm
from millrace.ops.triton.compile.dry_run import source_of

backend = make_backend(GPUTarget("cuda", 90, 32))
for text in json.loads(sys.argv[1]):
    source, options = source_of(text, norm._norm_kernel)
    key = get_cache_key(source, backend, backend.parse_options(options), get_cache_invalidating_env_vars())
    manager = get_cache_manager(hashlib.sha256(key.encode()).hexdigest())
    print(bool(manager.get_group(f"{source.name[:150]}.json")))
"""


@pytest.mark.live
def test_the_server_fills_the_cache(tmp_path: Path) -> None:
    good, wide, bad = (json.dumps({**NORM, "constant_vals": constants(block)}) for block in (1024, 2048, 1000))
    environment = {**gpu_compiler.variables(), "TRITON_CACHE_DIR": str(tmp_path / "cache")}

    def run(command: list[str], given: str = "") -> str:
        done = subprocess.run(
            command, input=given, env=environment, capture_output=True, text=True, timeout=240, check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert run(gpu_compiler.command(CHECK, json.dumps([good, wide, bad]))).split() == ["False"] * 3
    requests = [
        {"target": ["cuda", 90, 32], "kernel": kernel, "turn": int(kernel == wide)} for kernel in (good, bad, wide)
    ]
    lines = "".join(json.dumps(request) + "\n" for request in requests)
    build_server = [sys.executable, "-m", "millrace.ops.triton.compile.build_server"]
    assert sorted(run(build_server, given=lines)) == ["0", "0", "1"]
    assert run(gpu_compiler.command(CHECK, json.dumps([good, wide, bad]))).split() == ["True", "True", "False"]


class FakeServer:
    """A build server without a process: the test replies in its place."""

    def __init__(self) -> None:
        reader, self.replies = os.pipe()
        self.stdin, self.stdout = io.BytesIO(), os.fdopen(reader, "rb")
        self.is_running = True

    def reply(self, turn: int) -> None:
        os.write(self.replies, str(turn).encode())

    def kill(self) -> None:
        if self.is_running:
            os.close(self.replies)
        self.is_running = False

    def wait(self, timeout: float | None = None) -> None:
        assert not self.is_running


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> FakeServer:
    server = FakeServer()
    monkeypatch.setattr(kernel_build_pool.subprocess, "Popen", lambda *_, **__: server)
    return server


def test_a_build_pool_whose_server_died_has_no_open_requests(tmp_path: Path, server: FakeServer) -> None:
    build_pool = KernelBuildPool(tmp_path / "marks" / "mark")
    build_pool.request("{}", ("cuda", 90, 32), can_wait=True)
    assert build_pool.is_done(urgent_only=True)
    assert not build_pool.is_done()
    build_pool.request("[]", ("cuda", 90, 32))
    assert not build_pool.is_done(urgent_only=True)
    server.kill()
    assert build_pool.is_done()
    build_pool.request("1", ("cuda", 90, 32))
    assert build_pool.is_done()
    build_pool.close()
    assert not (tmp_path / "marks").exists()


def test_a_build_pool_waits_while_replies_come(
    tmp_path: Path, server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = FakeClock()
    monkeypatch.setattr(kernel_build_pool, "time", SimpleNamespace(monotonic=clock))
    build_pool = KernelBuildPool(tmp_path / "mark")
    for kernel in "abc":
        build_pool.request(kernel, ("cuda", 90, 32), can_wait=True)
    for _ in range(2):
        clock.now += kernel_build_pool.REPLY_LIMIT_S
        assert not build_pool.is_done()
        server.reply(1)
    assert not build_pool.is_done()
    assert server.is_running
    clock.now += kernel_build_pool.REPLY_LIMIT_S + 1.0
    build_pool.is_done()
    assert build_pool.is_done(), "no reply came within the limit"
    assert not server.is_running


def test_no_build_pool_without_a_gpu() -> None:
    if not interpreted:
        pytest.skip("this machine has a GPU")
    assert start_build_pool(Config()) is None


KEYS = """
import importlib, json, pkgutil, sys
from triton.runtime.jit import JITFunction
import millrace.ops.triton as room

names = [info.name for info in pkgutil.walk_packages(room.__path__, f"{room.__name__}.")]
modules = [importlib.import_module(name) for name in names if not name.endswith("build_server")]
kernels = {f"{f.module}.{f.__name__}": f for m in modules for f in vars(m).values() if isinstance(f, JITFunction)}
for name in sorted(kernels, reverse=sys.argv[1] == "backwards"):
    kernels[name].cache_key
print(json.dumps({name: kernel.cache_key for name, kernel in kernels.items()}))
"""


@pytest.mark.live
def test_a_kernels_key_does_not_depend_on_earlier_compilation() -> None:
    """Otherwise the build server would store a kernel under a key that the engine does not look up."""

    def keys(order: str) -> dict[str, str]:
        command = gpu_compiler.command(KEYS, order)
        found: dict[str, str] = json.loads(subprocess.check_output(command, env=gpu_compiler.variables(), timeout=60))
        return found

    one, two = keys("forwards"), keys("backwards")
    assert {name.split(".")[3] for name in one} > {"attention", "gemm", "moe", "sampling", "norm"}
    assert one == two
