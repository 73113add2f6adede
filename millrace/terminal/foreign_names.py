"""Options and commands that users of vLLM, Ollama, llama.cpp and SGLang type, and what they are called here."""

from __future__ import annotations

SAME_OPTIONS = {
    "--max-model-len": "--max-context",
    "--context-length": "--max-context",
    "--ctx-size": "--max-context",
    "--num-ctx": "--max-context",
    "--gpu-memory-utilization": "--fraction",
    "--mem-fraction-static": "--fraction",
    "--served-model-name": "--served-name",
    "--alias": "--served-name",
    "--max-num-seqs": "--max-running",
    "--max-running-requests": "--max-running",
    "--parallel": "--max-running",
    "--max-num-batched-tokens": "--token-budget",
    "--chunked-prefill-size": "--token-budget",
    "--kv-cache-dtype": "--kv-dtype",
    "--model-path": "--source",
    "--ssl-certfile": "--tls-cert",
    "--ssl-keyfile": "--tls-key",
    "--allowed-origins": "--cors-origins",
    "--enable-prefix-caching": "--prefix-cache",
    "--enable-request-logging": "--log-requests",
    "--enable-log-requests": "--log-requests",
}
"""Options with the same meaning and the same kind of value: understood as ours."""

SWITCHES = {
    "--enforce-eager": "--no-graphs",
    "--disable-cuda-graph": "--no-graphs",
    "--no-enable-prefix-caching": "--no-prefix-cache",
    "--disable-radix-cache": "--no-prefix-cache",
}
"""Options without a value: understood as ours."""

ADVICE = {
    "--api-key": "A server reads its keys from a file: `millrace keys add` makes one, --keys-file names it.",
    "--tensor-parallel-size": "A model runs on one GPU here; use a smaller or quantised model (--quantization fp8).",
    "--tp-size": "A model runs on one GPU here; use a smaller or quantised model (--quantization fp8).",
    "--pipeline-parallel-size": "A model runs on one GPU here; use a smaller or quantised model.",
    "--data-parallel-size": "Start one server per GPU behind a load balancer.",
    "--swap-space": "Use --kv-host-gib for a KV tier in host memory.",
    "--trust-remote-code": "Code from model repositories is never run here. Leave it out.",
    "--generation-config": "Use --generation-defaults model or neutral.",
    "--n-gpu-layers": "A model runs wholly on one device: --device cuda or --device cpu.",
    "--ngl": "A model runs wholly on one device: --device cuda or --device cpu.",
    "--revision": "Give the revision with the name: org/model@revision.",
    "--download-dir": "Set XDG_CACHE_HOME (known models) or HF_HOME (hub) in the environment.",
    "--disable-log-requests": "Requests are not logged unless --log-requests is given. Leave it out.",
    "--uvicorn-log-level": "Use --log-level.",
    "--root-path": "Use a reverse proxy that strips the path.",
    "--speculative-config": "Use --speculate and, for drafters that are models, --drafter.",
    "--keepalive": "The model stays loaded while the server runs. Leave it out.",
    "--verbose": "Speed is shown after each answer and by /stats. Leave it out.",
    "--nowordwrap": "Use --plain.",
}
"""Options that mean something else here, or nothing."""

COMMANDS = {
    "list": "ls",
    "tags": "ls",
    "fetch": "pull",
    "download": "pull",
    "delete": "rm",
    "remove": "rm",
    "cp": "alias",
    "start": "serve",
    "complete": "generate",
    "info": "show",
}
"""Commands that are understood under another name."""


def translated(arguments: list[str], own: set[str]) -> list[str]:
    """The arguments with foreign options replaced by ours, unless the command has that option itself (`own`)."""
    result = []
    for item in arguments:
        flag, equals, value = item.partition("=")
        normal = flag.replace("_", "-") if flag.startswith("--") else flag
        ours = SAME_OPTIONS.get(normal) or SWITCHES.get(normal)
        if ours is not None and flag not in own and (ours in own):
            result.append(f"{ours}{equals}{value}")
        else:
            result.append(item)
    return result
