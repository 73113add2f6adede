"""Starts `python -m millrace serve` in its own process, as a user does, and writes a tiny model for it. For tests."""

from __future__ import annotations

import json
import os
import queue
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from serve.wire import get

START_LIMIT_S = 180.0
TINY = "tiny"
"""Name of the tiny model."""
TINY_VOCAB = 300
_SERVING = re.compile(r"http://[^ :]+:(\d+)")
_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": TINY_VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "eos_token_id": 299,
    "bos_token_id": 298,
}
_TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


class RealServer:
    def __init__(self, *options: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "millrace", "serve", "--port", "0", *options],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "OMP_WAIT_POLICY": "PASSIVE"},
        )
        self.lines: list[str] = []
        self._found: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        try:
            self.port = self._found.get(timeout=START_LIMIT_S)
        except queue.Empty:
            self.port = 0
        if self.port == 0:
            self.process.kill()
            raise AssertionError("the server did not start:\n" + "".join(self.lines))

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line)
            found = _SERVING.search(line)
            if found and "Serving" in line:
                self._found.put(int(found[1]))
        self._found.put(0)

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def wait(self, limit_s: float = 60.0) -> int:
        code = self.process.wait(limit_s)
        self._reader.join(60)
        return code

    def kill(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(60)


def kv_used(server: RealServer) -> float:
    """KV blocks in use."""
    text = get(server.port, "/metrics").body.decode()
    [line] = [line for line in text.splitlines() if line.startswith('millrace_kv_blocks{state="used"}')]
    return float(line.split()[-1])


@contextmanager
def real_server(*options: str) -> Iterator[RealServer]:
    server = RealServer(*options)
    try:
        yield server
        if server.process.poll() is None:
            server.signal(signal.SIGTERM)
            assert server.wait() == 0, "".join(server.lines)
    finally:
        server.kill()


def tiny_model(directory: Path, *, max_context: int = 256) -> tuple[str, ...]:
    """Write the files of a tiny random model; returns the options of its server."""
    (directory / "config.json").write_text(json.dumps({**_CONFIG, "max_position_embeddings": max_context}))
    (directory / "template.jinja").write_text(_TEMPLATE)
    return (
        *(f"random:{directory / 'config.json'}", "--served-name", TINY, "--dtype", "float32"),
        *("--kv-tokens", str(max(8192, 2 * max_context)), "--chat-template", str(directory / "template.jinja")),
        *("--threads", "1", "--data-dir", str(directory / "data")),
    )
