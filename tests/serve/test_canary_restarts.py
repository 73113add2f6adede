"""A canary over a real restart of the server: killed in the middle of an answer, and taken back by the next one."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import transformers
from helpers.adapter_files import ATTENTION, write_adapter
from helpers.served import Served, serving, wait_until
from helpers.tiny_server import CONFIG, NAME, tiny_options

from millrace.bench.local_server import descendants

pytestmark = [pytest.mark.live, pytest.mark.timeout(300)]
ADAPTER = f"{NAME}:pirate"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Adapters `old` and `new`."""
    values = {name: value for name, value in CONFIG.items() if name != "architectures"}
    base = transformers.LlamaForCausalLM(transformers.LlamaConfig(**values))
    for seed, name in enumerate(("old", "new")):
        write_adapter(tmp_path / name, base, rank=4, targets=ATTENTION, seed=seed, size=8.0)
    return tmp_path


def asked(served: Served) -> str | int:
    """Its answer, or the status of an error."""
    body = {"model": ADAPTER, "prompt": "Why", "max_tokens": 12, "temperature": 0}
    status, answer = served.request("POST", "/v1/completions", body)
    text: str = answer["choices"][0]["text"] if status == 200 else ""
    return text or status


def canary(served: Served) -> dict[str, Any]:
    status, answer = served.request("GET", "/v1/adapters/pirate")
    assert status == 200, answer
    found: dict[str, Any] = answer["canary"]
    return found


def kill(served: Served) -> None:
    """All of its processes."""
    own = [served.process.pid, *descendants(served.process.pid)]
    for pid in own:
        os.kill(pid, signal.SIGKILL)
    served.process.wait()
    wait_until(lambda: not any(map(is_alive, own)), "they ended")


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_killed_server_goes_on_with_its_canary_and_takes_a_bad_version_back(folder: Path) -> None:
    kept = ("--adapters", f"pirate={folder / 'old'}", "--allow-adapters", "--canary-file", str(folder / "kept.jsonl"))
    options = (*tiny_options(folder), "--max-context", "512", "--kv-tokens", "4096", *kept)
    with serving(*options) as first:
        old = asked(first)
        where = "/v1/adapters/pirate/canary"
        status, answer = first.request("POST", where, {"path": str(folder / "new"), "share": 0.5})
        assert status == 200, answer
        answers = [asked(first) for _ in range(3)]
        assert answers[0] == answers[2] == old != answers[1]
        stream = first.open_stream(model=ADAPTER, max_tokens=400)
        next(iter(stream))  # The fourth request, for the new version, is being answered.
        before = canary(first)
        kill(first)
        stream.close()
    assert (before["old"]["requests"], before["new"]["requests"]) == (2, 1)
    (folder / "new" / "adapter_model.safetensors").write_bytes(b"damaged meanwhile")
    with serving(*options) as second:
        after = canary(second)
        assert (after["status"], after["old"]) == ("running", before["old"])
        assert (after["new"]["requests"], after["new"]["failed"]) == (2, 1), "the crash counts"
        assert [asked(second) for _ in range(4)] == [old, 500, old, 500]
        wait_until(lambda: canary(second)["status"] == "returned", "the new version is taken back")
        assert "3 of 4 requests of the new version failed" in canary(second)["why"]
        assert [asked(second) for _ in range(4)] == [old] * 4
