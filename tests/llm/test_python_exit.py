"""A program that leaves a model open ends without a crash."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.tiny_server import CONFIG

pytestmark = pytest.mark.live

PROGRAM = """
import atexit, sys, threading
atexit.register(lambda: print([one.name for one in threading.enumerate()]))   # registered first, called last
from millrace import LLM

llm = LLM(sys.argv[1], device="cpu", dtype="float32", kv_tokens=8192)
for part in llm.stream("Once", max_tokens=8, ignore_eos=True):
    pass
"""


def test_an_open_model_is_closed_when_the_program_ends(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    command = [sys.executable, "-c", PROGRAM, f"random:{tmp_path / 'config.json'}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "['MainThread']"
