"""Kernels compiled ahead land in Triton's cache, and one that cannot be compiled harms nobody.

In processes of their own, since here Triton may be in its interpreter; nothing of this needs a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from helpers.triton_mode import interpreted

from millrace.config import Config
from millrace.run.graphs import kernel_build_pool as kernel_builder
from millrace.run.graphs.kernel_build_pool import KernelBuilder, start_builder

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
from millrace.ops.triton.compile.prebuild import source_of

backend = make_backend(GPUTarget("cuda", 90, 32))
for text in json.loads(sys.argv[1]):
    source, options = source_of(text, norm._norm_kernel)
    key = get_cache_key(source, backend, backend.parse_options(options), get_cache_invalidating_env_vars())
    manager = get_cache_manager(hashlib.sha256(key.encode()).hexdigest())
    print(bool(manager.get_group(f"{source.name[:150]}.json")))
"""


def compiling() -> dict[str, str]:
    """The environment of a process in which Triton compiles."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return environment | {"PYTHONPATH": os.pathsep.join(sys.path)}


def test_the_server_fills_the_cache(tmp_path: Path) -> None:
    good, wide, bad = (json.dumps({**NORM, "constant_vals": constants(block)}) for block in (1024, 2048, 1000))
    environment = {**compiling(), "TRITON_CACHE_DIR": str(tmp_path / "cache")}

    def run(*arguments: str, told: str = "") -> str:
        command = [sys.executable, *arguments]
        done = subprocess.run(
            command, input=told, env=environment, capture_output=True, text=True, timeout=240, check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert run("-c", CHECK, json.dumps([good, wide, bad])).split() == ["False"] * 3
    orders = [
        {"target": ["cuda", 90, 32], "kernel": kernel, "turn": int(kernel == wide)} for kernel in (good, bad, wide)
    ]
    told = "".join(json.dumps(order) + "\n" for order in orders)
    assert sorted(run("-m", "millrace.ops.triton.compile.build_server", told=told)) == ["0", "0", "1"]
    assert run("-c", CHECK, json.dumps([good, wide, bad])).split() == ["True", "True", "False"]


def test_a_builder_whose_server_died_has_nothing_left_to_wait_for(tmp_path: Path) -> None:
    builder = KernelBuilder(tmp_path / "marks" / "mark")
    builder.order("{}", ("cuda", 90, 32), can_wait=True)
    assert builder.is_done(all_of_it=False)
    assert not builder.is_done()
    builder.order("[]", ("cuda", 90, 32))
    assert not builder.is_done(all_of_it=False)
    builder._server.kill()
    assert builder.is_done(20.0)
    builder.order("1", ("cuda", 90, 32))
    assert builder.is_done()
    builder.close()
    assert not (tmp_path / "marks").exists()


SLOW = """
import sys, time
for line in sys.stdin:
    time.sleep(0.3)
    print(1, end="", flush=True)
"""


def test_a_builder_waits_as_long_as_answers_come(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    builder = KernelBuilder(tmp_path / "mark")
    builder.close()
    builder._server = subprocess.Popen([sys.executable, "-c", SLOW], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    monkeypatch.setattr(kernel_builder, "REPLY_LIMIT_S", 0.8)
    for kernel in "abcde":
        builder.order(kernel, ("cuda", 90, 32), can_wait=True)
    until = time.monotonic() + 20.0
    while not builder.is_done(0.01):
        assert time.monotonic() < until
    assert builder._server.poll() is None, "it was given up"
    builder.close()


def test_no_builder_without_a_gpu() -> None:
    if not interpreted:
        pytest.skip("this machine has a GPU")
    assert start_builder(Config()) is None


KEYS = """
import importlib, json, pkgutil, sys
from triton.runtime.jit import JITFunction
import millrace.ops.triton as room

names = [info.name for info in pkgutil.iter_modules(room.__path__) if info.name != "build_server"]
modules = [importlib.import_module(f"{room.__name__}.{name}") for name in names]
kernels = {f"{f.module}.{f.__name__}": f for m in modules for f in vars(m).values() if isinstance(f, JITFunction)}
for name in sorted(kernels, reverse=sys.argv[1] == "backwards"):
    kernels[name].cache_key
print(json.dumps({name: kernel.cache_key for name, kernel in kernels.items()}))
"""


def test_a_kernels_key_does_not_depend_on_what_was_compiled_before() -> None:
    """Else the server would compile under one name what the engine looks for under another."""

    def keys(order: str) -> dict[str, str]:
        command = [sys.executable, "-c", KEYS, order]
        found: dict[str, str] = json.loads(subprocess.check_output(command, env=compiling(), timeout=60))
        return found

    one, two = keys("forwards"), keys("backwards")
    assert len(one) > 20
    assert one == two
