"""Kernels compiled ahead by children land in Triton's cache, and one that cannot be compiled harms nobody.

In a process of its own, since here Triton may be in its interpreter; nothing of this needs a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

PROGRAM = """
import triton, triton.language as tl
from triton.backends.compiler import GPUTarget
from millrace.ops.triton.prebuild import Job, build

@triton.jit
def double(x_ptr, n, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(x_ptr + i, tl.load(x_ptr + i, mask=i < n) * 2, mask=i < n)

@triton.jit
def broken(x_ptr, n, BLOCK: tl.constexpr):
    tl.store(x_ptr + tl.arange(0, BLOCK), tl.no_such_thing(n))

signature = {"x_ptr": "*fp32", "n": "i32", "BLOCK": "constexpr"}
jobs = [Job(double, signature, {(2,): size}, {}, {"num_warps": 4}) for size in (64, 128, 256)]
target = GPUTarget("cuda", 90, 32)
print(build(jobs, target), build(jobs, target), build([Job(broken, signature, {(2,): 64}, {}, {})], target))
"""


def test_children_fill_the_cache(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path / "cache"), "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, str(program)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout.split() == ["3", "0", "1"], done.stderr
