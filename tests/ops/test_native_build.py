"""Building the C++ kernels: once, into the cache, with a clear reason if that is impossible."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers.inside import without_compiler

from millrace.ops.cpp import native as native_module
from millrace.ops.cpp.native import NativeUnavailable, build, native, native_missing


def test_second_build_uses_the_cache() -> None:
    path = native().path
    assert native_missing(torch.device("cpu")) == ""
    before = path.stat().st_mtime_ns
    assert build(path.parent) == path
    assert path.stat().st_mtime_ns == before


def program(path: Path, script: str) -> Path:
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path


@pytest.mark.live
def test_old_objects_are_deleted(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    cache.mkdir()
    for number in range(12):
        (cache / f"kernels-old{number}.so").touch()
    compiler = program(tmp_path / "compiler", 'while [ $# -gt 0 ]; do [ "$1" = -o ] && : > "$2"; shift; done')
    path = build(cache, compilers=(str(compiler),))
    found = list(cache.iterdir())
    assert path in found
    assert len(found) == native_module.MAX_CACHED_OBJECTS


def test_without_a_compiler_the_reason_is_given(tmp_path: Path) -> None:
    with pytest.raises(NativeUnavailable, match="needs a C\\+\\+ compiler"):
        build(tmp_path, compilers=("no-such-compiler",))


@pytest.mark.live
def test_compiler_error_is_quoted_and_leaves_no_files(tmp_path: Path) -> None:
    broken = program(tmp_path / "broken", "echo 'error: out of ideas' >&2; exit 1")
    with pytest.raises(NativeUnavailable, match="out of ideas"):
        build(tmp_path / "cache", compilers=(str(broken),))
    assert not list((tmp_path / "cache").iterdir())


def test_ops_fall_back_to_torch_and_say_why(monkeypatch: pytest.MonkeyPatch) -> None:
    reason = "needs a C++ compiler (g++); none is installed"
    without_compiler(monkeypatch, reason)
    from millrace.ops.registry import TYPICAL_SHAPE, choose

    cpu = torch.device("cpu")
    for op in ("linear", "attention", "rms_norm", "add_rms_norm", "qkv", "gated", "tied_embedding"):
        choice = choose(op, cpu, torch.bfloat16, **TYPICAL_SHAPE)
        assert choice.version.name != "native"
        assert reason in choice.reason
    assert reason in native_module.native_notes(cpu)[0]
    assert native_module.native_notes(torch.device("cuda")) == ()
    with pytest.raises(Exception, match="needs a C\\+\\+ compiler"):
        choose("attention", cpu, torch.bfloat16, deterministic=True, **TYPICAL_SHAPE)


@pytest.mark.live
def test_pool_has_as_many_threads_as_torch_works_after_a_fork_and_sleeps_when_idle() -> None:
    """In one process, since importing torch takes longer than all of it. A forked child starts its own threads."""
    script = """
import os, threading, time, torch
from pathlib import Path
torch.set_num_threads(3)
from millrace.ops.linear.dense import NativeLinear
torch.manual_seed(0)
x, weight = torch.randn(200, 512), torch.randn(2048, 512)
before = len(os.listdir('/proc/self/task'))
layer = NativeLinear(weight)
expected = layer(x)
assert len(os.listdir('/proc/self/task')) <= before + 2
child = os.fork()
if child == 0:
    os._exit(0 if torch.equal(layer(x), expected) else 1)
assert os.waitpid(child, 0)[1] == 0
def state(thread):  # R while it computes, spins or waits for a core, S while it sleeps
    return (thread / 'stat').read_text().rpartition(')')[2].split()[0]
others = [thread for thread in Path('/proc/self/task').iterdir() if thread.name != str(os.getpid())]
assert len(others) >= 2
until = time.monotonic() + 60
while any(state(thread) != 'S' for thread in others):
    assert time.monotonic() < until, 'idle threads sleep'
    time.sleep(0.01)
results = [None] * 4
def run(i):
    results[i] = all(torch.equal(layer(x), expected) for _ in range(5))
threads = [threading.Thread(target=run, args=(i,)) for i in range(4)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
assert all(results), 'several threads at once'
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120, cwd=Path(__file__).parents[2])
