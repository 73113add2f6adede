"""`millrace serve` as a program: the curl line works, it drains, it cleans up, errors are one sentence."""

from __future__ import annotations

import gc
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from helpers.served import command_line, wait_until
from helpers.tiny_server import tiny_source
from safetensors.numpy import save_file
from serve.wire import chat_text, stream

from millrace.bench.local_server import descendants
from millrace.cli import main

pytestmark = pytest.mark.live

MODEL = "smollm2-135m-instruct"
QUICK = ("--dtype", "float32", "--kv-tokens", "4096", "--threads", "1")


class Served:
    def __init__(self, process: subprocess.Popen[str], lines: list[str]) -> None:
        self.process = process
        self.lines = lines
        self.url = re.match(r"curl (http://[^/]+)/", lines[-1])[1]

    def post(self, path: str, body: object) -> Any:
        data = json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=60) as response:
            return json.loads(response.read())

    def get(self, path: str) -> int:
        with urllib.request.urlopen(self.url + path, timeout=60) as response:
            return response.status


@contextmanager
def serving(*options: str) -> Iterator[Served]:
    process = subprocess.Popen(
        [sys.executable, "-m", "millrace", "serve", "--port", "0", *QUICK, *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        lines = []
        while not lines or not lines[-1].startswith("curl "):
            line = process.stdout.readline()
            assert line, f"the server ended: {process.stderr.read()}"
            lines.append(line.rstrip("\n"))
        yield Served(process, lines)
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()
        process.stdout.close()
        process.stderr.close()


@pytest.fixture
def own_collector() -> Iterator[None]:
    """A server sets the garbage collector of its process, which is here the tests'."""
    thresholds = gc.get_threshold()
    yield
    gc.unfreeze()
    gc.set_threshold(*thresholds)


def end(served: Served, number: int = signal.SIGTERM) -> int:
    served.process.send_signal(number)
    return served.process.wait(60)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.fresh
def test_last_line_works_when_pasted_and_sigterm_ends_everything() -> None:
    with serving() as served:
        assert any("KV pool" in line for line in served.lines)
        words = shlex.split(served.lines[-1])
        body = {**json.loads(words[words.index("-d") + 1]), "max_tokens": 8}
        answer = served.post(words[1].removeprefix(served.url), body)
        assert answer["choices"][0]["message"]["content"]
        assert served.get("/ready") == 200
        children = descendants(served.process.pid)
        assert len(children) == 1, "one engine process"
        maps = Path(f"/proc/{served.process.pid}/maps").read_text()
        assert "libtorch" not in maps, "the front must not load torch"
        assert end(served) == 0
        assert not any(alive(pid) for pid in children)


@pytest.mark.fresh
def test_in_process_needs_no_child_and_ends_on_ctrl_c() -> None:
    with serving("--in-process") as served:
        assert descendants(served.process.pid) == []
        asked = {"model": MODEL, "messages": [{"role": "user", "content": "What is the capital of France?"}]}
        asked |= {"temperature": 0, "max_tokens": 16}
        answer = served.post("/v1/chat/completions", asked)["choices"][0]["message"]["content"]
        assert "Paris" in answer
        port = int(served.url.rpartition(":")[2])
        assert chat_text(stream(port, "/v1/chat/completions", asked)) == answer
        assert end(served, signal.SIGINT) == 0
        assert "Stopping: no requests are running." in served.process.stderr.read()


@pytest.mark.fresh
def test_two_fronts_share_the_port_and_nothing_outlives_the_first(tmp_path: Path) -> None:
    with serving(tiny_source(tmp_path), "--served-name", MODEL, "--fronts", "2") as served:
        # A program that one of them starts for a moment is no third.
        wait_until(lambda: len(descendants(served.process.pid)) == 2, "an engine and a second front")
        children = descendants(served.process.pid)
        fronts = [pid for pid in children if "front_child" in command_line(pid)]
        assert len(fronts) == 1
        wait_until(lambda: listening(fronts[0], served.url), "the second front listens too")
        for _ in range(12):  # the kernel spreads connections over both
            answer = served.post("/v1/completions", {"model": MODEL, "prompt": "Hi", "max_tokens": 1})
            assert answer["usage"]["completion_tokens"] == 1
        served.process.kill()
        wait_until(lambda: not any(alive(pid) for pid in children), "nothing outlives the first process")


def listening(pid: int, url: str) -> bool:
    """True if the process listens on the port of `url`."""
    port = int(url.rpartition(":")[2])
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    inodes = {row[9] for row in rows if row[3] == "0A" and int(row[1].rpartition(":")[2], 16) == port}
    links = []
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # It is closed meanwhile.
            links.append(os.readlink(entry))
    return any(f"socket:[{inode}]" in links for inode in inodes)


def test_servers_of_one_model_keep_their_files_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    tiny = (tiny_source(tmp_path), "--served-name", MODEL)
    with serving(*tiny, "--name", "first") as first, serving(*tiny) as second:
        sent = {"file": ("lines.jsonl", b"{}\n"), "purpose": (None, "batch")}
        file_id = httpx.post(first.url + "/v1/files", files=sent, timeout=60).raise_for_status().json()["id"]
        assert [file["id"] for file in httpx.get(first.url + "/v1/files", timeout=60).json()["data"]] == [file_id]
        assert httpx.get(second.url + "/v1/files", timeout=60).json()["data"] == []
        command = [sys.executable, "-m", "millrace", "serve", "--port", "0", *QUICK, *tiny, "--name", "first"]
        third = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        assert third.returncode != 0
        assert f"Another server stores its files, batches and responses in {tmp_path}/millrace/first." in third.stderr
        assert end(first) == end(second) == 0


def test_taken_port_is_refused_before_anything_is_loaded() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = run("--port", str(port))
    assert done.returncode == 2
    assert f"Cannot listen on 127.0.0.1:{port}" in done.stderr
    assert "--port" in done.stderr
    assert done.stdout == ""
    assert "weights" not in done.stderr


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("/no/such/model",), "/no/such/model"),
        (("smollm2-135m-instrukt",), "smollm2-135m-instruct"),
        (("--kv-gib", "100000", "--in-process"), "--kv-gib"),
        (("--chat-template", "/no/such/file", "--in-process"), "/no/such/file"),
    ],
)
@pytest.mark.usefixtures("own_collector")
def test_start_errors_are_one_sentence(options: tuple[str, ...], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--port", "0", *options]) in (1, 2)
    shown = capsys.readouterr().err
    errors = [line for line in shown.splitlines() if line.startswith("millrace: ")]
    assert len(errors) == 1
    assert says in errors[0]
    assert "Traceback" not in shown


def text_file(folder: Path) -> str:
    (folder / "README.md").write_text("Not a model.\n")
    return str(folder / "README.md")


def empty_directory(folder: Path) -> str:
    return str(folder)


def damaged_gguf(folder: Path) -> str:
    (folder / "model.gguf").write_bytes(b"GGUF\x03\0\0\0" + b"\x7f" * 64)
    return str(folder / "model.gguf")


def no_tokenizer(folder: Path) -> str:
    (folder / "config.json").write_text(json.dumps(SMALL))
    save_file({"model.embed_tokens.weight": np.zeros((96, 32), np.float32)}, folder / "model.safetensors")
    return str(folder)


def wrong_architecture(folder: Path) -> str:
    (folder / "config.json").write_text(json.dumps({**SMALL, "architectures": ["WatermillForCausalLM"]}))
    return f"random:{folder}"


def too_large(folder: Path) -> str:
    (folder / "config.json").write_text(json.dumps({**SMALL, "hidden_size": 1 << 20, "intermediate_size": 1 << 22}))
    return f"random:{folder}"


SMALL = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_act": "silu",
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e4,
}


def test_a_model_that_cannot_be_loaded_ends_in_a_sentence(tmp_path: Path) -> None:
    """Reads standard error until the last process that has it is gone, so an engine left behind is heard too."""
    done = run(too_large(tmp_path), "--port", "0", "--device", "cpu")
    assert done.returncode == 1
    status, message = done.stderr.splitlines()
    assert status == "starting the engine …"
    assert message.startswith("millrace: ")
    assert "does not fit" in message


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (text_file, "neither a .gguf or .onnx file nor a model directory"),
        (empty_directory, "no .safetensors, .gguf or .onnx files"),
        (damaged_gguf, "not a valid GGUF file"),
        (no_tokenizer, "tokenizer.json"),
        (wrong_architecture, "WatermillForCausalLM"),
    ],
)
@pytest.mark.usefixtures("own_collector")
def test_files_that_are_no_model_are_named_in_a_sentence(
    make: Callable[[Path], str], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the engine in this process: the sentence goes the same way through the channel."""
    assert main(["serve", make(tmp_path), "--port", "0", "--device", "cpu", "--in-process"]) == 1
    status, message = capsys.readouterr().err.splitlines()
    assert status == "starting the engine …"
    assert message.startswith("millrace: ")
    assert says in message


def run(*options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "millrace", "serve", *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
