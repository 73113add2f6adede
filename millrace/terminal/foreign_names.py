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
    "--tensor-parallel-size": "--tensor-parallel",
    "--tp-size": "--tensor-parallel",
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
    "--hf-repo": "--source",
    "--chat-template-file": "--chat-template",
    "-c": "--max-context",
    "-m": "--source",
    "-t": "--threads",
    "--max-loras": "--max-adapters",
    "--max-loras-per-batch": "--max-adapters",
    "-tp": "--tensor-parallel",
    "-np": "--max-running",
}
"""Options with the same meaning and the same kind of value: understood as ours."""

LISTS = {"--lora-modules": "--adapters", "--lora-paths": "--adapters"}
"""Options with several NAME=PATH behind them, of which ours takes one list with commas."""

SWITCHES = {
    "--enforce-eager": "--no-graphs",
    "--disable-cuda-graph": "--no-graphs",
    "--no-enable-prefix-caching": "--no-prefix-cache",
    "--disable-radix-cache": "--no-prefix-cache",
}
"""Options without a value: understood as ours."""

_ADAPTERS = "Adapters are named with --adapters NAME=PATH (directories that PEFT has saved)"
_ADAPTERS_ON = f"{_ADAPTERS}; --allow-adapters lets clients add more. Leave it out."
_GGUF_ADAPTERS = f"{_ADAPTERS}; adapters as GGUF files are not supported."
_IMAGES = "Images are not supported yet: models take text only."
_ONE_GPU = "Several GPUs per model are not supported yet; use a smaller or quantised model (--quantization fp8)."
_REPLICAS = "Start a server per GPU and `millrace gateway` in front of them; `millrace up fleet.toml` does both."
_ONE_DEVICE = "A model runs wholly on one device: --device cuda or --device cpu."
_EMBEDDINGS = "Every model serves embeddings (POST /v1/embeddings) without an option. Leave it out."
_RERANKING = "Serve a reranker: it answers POST /v1/rerank without an option. Leave it out."
_DRAFTS = "Use --speculate and, for drafters that are models, --drafter."
_DRAFT_COUNT = "Use --max-drafts."
_ALWAYS = "It is always on here. Leave it out."
_KV_TYPE = "Use --kv-dtype for keys and values together."
_NO_CHOICE = "There is no such choice here. Leave it out."
_BATCH = "Use --token-budget for the tokens of a step."

ADVICE = {
    # Not there yet.
    "--mmproj": _IMAGES,
    "--limit-mm-per-prompt": _IMAGES,
    "--mm-processor-kwargs": _IMAGES,
    "--enable-multimodal": _IMAGES,
    "--enable-expert-parallel": _ONE_GPU,
    "--tensor-split": _ONE_GPU,
    "--split-mode": _ONE_GPU,
    "--main-gpu": "Choose the GPU with CUDA_VISIBLE_DEVICES in the environment.",
    # Called or done otherwise.
    "--kv-transfer-config": "Replicas behind millrace gateway fetch KV blocks from each other. Leave it out.",
    "--enable-lora": _ADAPTERS_ON,
    "--lora": _GGUF_ADAPTERS,
    "--lora-scaled": _GGUF_ADAPTERS,
    "--lora-init-without-apply": _GGUF_ADAPTERS,
    "--lora-dtype": "Adapters are computed in the model's dtype. Leave it out.",
    "--max-cpu-loras": "Use --adapter-memory, in GiB, for adapters in host memory.",
    "--fully-sharded-loras": "With --tensor-parallel each rank has its part of an adapter. Leave it out.",
    "--task": "Every model generates and embeds. Leave it out.",
    "--runner": "Every model generates and embeds. Leave it out.",
    "--reranking": _RERANKING,
    "--rerank": _RERANKING,
    "--embedding": _EMBEDDINGS,
    "--embeddings": _EMBEDDINGS,
    "--is-embedding": _EMBEDDINGS,
    "--speculative-model": _DRAFTS,
    "--model-draft": _DRAFTS,
    "-md": _DRAFTS,
    "--speculative-algorithm": _DRAFTS,
    "--speculative-draft-model-path": _DRAFTS,
    "--num-speculative-tokens": _DRAFT_COUNT,
    "--draft-max": _DRAFT_COUNT,
    "--enable-chunked-prefill": _ALWAYS,
    "--cont-batching": _ALWAYS,
    "-cb": _ALWAYS,
    "--flash-attn": _ALWAYS,
    "-fa": _ALWAYS,
    "--jinja": _ALWAYS,
    "--metrics": "GET /metrics is always there. Leave it out.",
    "--disable-log-stats": "Figures are in GET /metrics, not in the log. Leave it out.",
    "--batch-size": _BATCH,
    "--ubatch-size": _BATCH,
    "--cache-type-k": _KV_TYPE,
    "--cache-type-v": _KV_TYPE,
    "--n-predict": "Requests say how long their answers may be: max_tokens.",
    "--mlock": _NO_CHOICE,
    "--no-mmap": _NO_CHOICE,
    "--cpu-offload-gb": "Weights stay on the device; --kv-host-gib keeps KV blocks in host memory.",
    "--load-format": "The format of weights is found from their files. Leave it out.",
    "--tokenizer": "The tokenizer is the model's own. Leave it out.",
    "--tokenizer-mode": "The tokenizer is the model's own. Leave it out.",
    "--guided-decoding-backend": "Grammars are compiled by llguidance. Leave it out.",
    "--rope-scaling": "It is read from the model's files. Leave it out.",
    "--hf-overrides": "The model is described by its config.json; change it there.",
    "--hf-token": "Set HF_TOKEN in the environment.",
    "--insecure": _NO_CHOICE,
    "--api-key": "A server reads its keys from a file: `millrace keys add` makes one, --keys-file names it.",
    "--pipeline-parallel-size": _ONE_GPU,
    "--data-parallel-size": _REPLICAS,
    "--dp-size": _REPLICAS,
    "--swap-space": "Use --kv-host-gib for a KV tier in host memory.",
    "--trust-remote-code": "Code from model repositories is never run here. Leave it out.",
    "--generation-config": "Use --generation-defaults model or neutral.",
    "--n-gpu-layers": _ONE_DEVICE,
    "--gpu-layers": _ONE_DEVICE,
    "--ngl": _ONE_DEVICE,
    "-ngl": _ONE_DEVICE,
    "--revision": "Give the revision with the name: org/model@revision.",
    "--download-dir": "Set XDG_CACHE_HOME (known models) or HF_HOME (hub) in the environment.",
    "--disable-log-requests": "Requests are not logged unless --log-requests is given. Leave it out.",
    "--uvicorn-log-level": "Use --log-level.",
    "--root-path": "Use a reverse proxy that strips the path.",
    "--speculative-config": _DRAFTS,
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
    rest = list(arguments)
    while rest:
        item = rest.pop(0)
        flag, equals, value = item.partition("=")
        normal = flag.replace("_", "-") if flag.startswith("--") else flag
        if normal in LISTS and LISTS[normal] in own:
            values = [value] if equals else []
            while rest and "=" in rest[0] and not rest[0].startswith("-"):
                values.append(rest.pop(0))
            result.append(f"{LISTS[normal]}={','.join(values)}")
            continue
        ours = SAME_OPTIONS.get(normal) or SWITCHES.get(normal)
        if ours is not None and flag not in own and (ours in own):
            result.append(f"{ours}{equals}{value}")
        else:
            result.append(item)
    return result
