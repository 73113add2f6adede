"""The checks of `millrace doctor`: each looks at one thing, explains what it found, and offers the fix."""

from __future__ import annotations

import importlib.util
import os
import platform
import resource
import shutil
import socket
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from millrace.config import Config, cache_dir
from millrace.errors import MillraceError
from millrace.host.cores import usable_cores
from millrace.host.free_memory import available_bytes, tightest_group
from millrace.sources.library import is_downloaded
from millrace.sources.names import has_gpu

if TYPE_CHECKING:
    from millrace.text.chat.template import ChatTemplate

Status = Literal["ok", "warning", "problem"]
LOW_DISK_BYTES = 5e9
LOW_MEMORY_BYTES = 2e9
FEW_OPEN_FILES = 4096
_PROBE_TIMEOUT_S = 120
_COMPILERS = ("g++", "c++", "clang++")


@dataclass(frozen=True, slots=True)
class Finding:
    subject: str
    status: Status
    text: str
    fix: str = ""
    """What to do or to type; empty if nothing."""


Check = Callable[[Config], Iterator[Finding]]


def run_checks(config: Config) -> Iterator[Finding]:
    for check in CHECKS:
        try:
            yield from check(config)
        except Exception as error:
            yield Finding(check.__name__.removeprefix("check_"), "problem", f"The check failed: {error!r}")


def check_python(config: Config) -> Iterator[Finding]:
    version = platform.python_version()
    if tuple(map(int, platform.python_version_tuple()[:2])) < (3, 11):
        yield Finding("python", "problem", f"Python {version}; 3.11 or newer is needed.", "Install a newer Python.")
    else:
        yield Finding("python", "ok", f"Python {version} on {platform.system()} {platform.machine()}")


def check_torch(config: Config) -> Iterator[Finding]:
    if importlib.util.find_spec("torch") is None:
        yield Finding("torch", "problem", "torch is not installed.", "pip install torch")
        return
    probe = "import torch; print(torch.__version__, torch.version.cuda, torch.cuda.is_available())"
    import sys

    done = subprocess.run(
        [sys.executable, "-c", probe], capture_output=True, text=True, timeout=_PROBE_TIMEOUT_S, check=False
    )
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        yield Finding("torch", "problem", f"torch cannot be imported: {last}", "pip install --force-reinstall torch")
        return
    version, cuda, available = done.stdout.split()
    yield Finding("torch", "ok", f"torch {version}")
    yield from _gpu_findings(config, cuda, available == "True")


def _gpu_findings(config: Config, cuda: str, available: bool) -> Iterator[Finding]:
    if available:
        yield Finding("gpu", "ok", f"A CUDA device is usable (torch for CUDA {cuda}).")
    elif has_gpu() and cuda == "None":
        yield Finding(
            "gpu",
            "problem",
            "An NVIDIA driver is loaded, but this torch was built for CPUs only.",
            "pip install torch --index-url https://download.pytorch.org/whl/cu128",
        )
    elif has_gpu():
        yield Finding(
            "gpu",
            "problem",
            f"An NVIDIA driver is loaded, but torch for CUDA {cuda} cannot use it: the driver is too old, or the"
            " container does not pass the GPU.",
            "Run nvidia-smi; update the driver, or start the container with --gpus all",
        )
    elif config.run.device == "cuda":
        yield Finding("gpu", "problem", "--device cuda is set, but there is no NVIDIA driver.", "Use --device cpu")
    else:
        yield Finding("gpu", "ok", "No NVIDIA GPU; models run on the CPU.")


def check_compiler(config: Config) -> Iterator[Finding]:
    found = next((path for name in _COMPILERS if (path := shutil.which(name))), None)
    if found is None:
        yield Finding(
            "compiler",
            "warning",
            "There is no C++ compiler, so the CPU kernels cannot be built for this processor.",
            "apt install g++ (Debian, Ubuntu) or dnf install gcc-c++ (Fedora)",
        )
    else:
        yield Finding("compiler", "ok", found)


def check_port(config: Config) -> Iterator[Finding]:
    host, port = config.server.host, config.server.port
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            reason = error.strerror or error
            yield Finding(
                "port",
                "problem",
                f"Cannot listen on {host}:{port}: {reason}.",
                "millrace ps shows our servers; or serve with another --port",
            )
            return
    yield Finding("port", "ok", f"{host}:{port} is free")


def check_disk(config: Config) -> Iterator[Finding]:
    folder = cache_dir()
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    free = shutil.disk_usage(existing).free
    if not os.access(existing, os.W_OK):
        yield Finding("disk", "problem", f"{existing} is not writable.", "Set XDG_CACHE_HOME to a writable directory")
    elif free < LOW_DISK_BYTES:
        fix = "millrace rm deletes models; or set XDG_CACHE_HOME to a larger disk"
        yield Finding("disk", "warning", f"Only {free / 1e9:.1f} GB are free for models in {folder}.", fix)
    else:
        yield Finding("disk", "ok", f"{free / 1e9:.0f} GB free for models in {folder}")


def check_memory(config: Config) -> Iterator[Finding]:
    available = available_bytes()
    group = tightest_group()
    limited = f" (this control group: {group.used / 1e9:.1f} of {group.limit / 1e9:.1f} GB used)" if group else ""
    if available and available < LOW_MEMORY_BYTES:
        fix = "End other programs, raise the container's memory limit, or choose a smaller model (millrace models)"
        yield Finding("memory", "warning", f"Only {available / 1e9:.1f} GB are available{limited}.", fix)
    else:
        yield Finding("memory", "ok", f"{available / 1e9:.1f} GB available{limited}")


def check_threads(config: Config) -> Iterator[Finding]:
    cores, present = usable_cores(), os.cpu_count() or 1
    wanted = config.run.threads
    if wanted > cores:
        yield Finding(
            "threads",
            "warning",
            f"--threads is {wanted}, but this process may use {cores} cores; more threads than cores are slower.",
            f"Use --threads {cores}",
        )
    elif cores < present:
        yield Finding("threads", "ok", f"{cores} of {present} cores (affinity or CPU quota of the container)")
    else:
        yield Finding("threads", "ok", f"{cores} cores")


def check_open_files(config: Config) -> Iterator[Finding]:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < FEW_OPEN_FILES:
        text = f"At most {hard:,} files may be open, which limits the number of streams."
        yield Finding("open files", "warning", text, "ulimit -Hn 65536, or LimitNOFILE=65536 in the unit file")
    else:
        yield Finding("open files", "ok", "unlimited" if hard == resource.RLIM_INFINITY else f"up to {hard:,}")


def check_model(config: Config) -> Iterator[Finding]:
    """Files, tokenizer, chat template and end tokens of the configured model."""
    from millrace.sources.resolve import resolve_model
    from millrace.text.chat.template import load_chat_template
    from millrace.text.tokenizers.load import load_tokenizer

    source = config.model.source
    if not is_downloaded(source):
        yield _absent_model(source)
        return
    try:
        files = resolve_model(source, offline=True)
        tokenizer = load_tokenizer(files)
    except MillraceError as error:
        yield Finding("model", "problem", error.message)
        return
    size = sum(path.stat().st_size for path in files.weights)
    yield Finding("model", "ok", f"{files.name}: {files.kind}, {size / 1e6:,.0f} MB, {tokenizer.vocab_size:,} tokens")
    outside = [token for token in tokenizer.end_token_ids if not 0 <= token < tokenizer.vocab_size]
    if not tokenizer.end_token_ids:
        fix = "Correct eos_token_id in generation_config.json"
        yield Finding("end tokens", "warning", "The model names no end token: answers end only at a limit.", fix)
    elif outside:
        yield Finding("end tokens", "problem", f"End tokens {outside} are outside the vocabulary.", "Download it again")
    else:
        yield Finding("end tokens", "ok", ", ".join(map(str, tokenizer.end_token_ids)))
    template = load_chat_template(files, tokenizer, config.model.chat_template)
    try:
        template.render([{"role": "user", "content": "Hello"}])
        yield Finding("template", "ok", "The chat template renders.")
    except MillraceError as error:
        yield Finding("template", "warning", error.message, "Use /v1/completions, or give --chat-template FILE")
        return
    yield from _tool_findings(config, template)


def _tool_findings(config: Config, template: ChatTemplate) -> Iterator[Finding]:
    from millrace.text.answer_formats import choose_formats
    from millrace.text.template_calls import contradictions

    try:
        spec = choose_formats(template, config.model.tool_format, config.model.reasoning_format).tools
    except MillraceError as error:
        yield Finding("tools", "problem", error.message)
        return
    wrong = contradictions(template, spec)
    for text in wrong:
        yield Finding("tools", "warning", text, "Give a corrected template with --chat-template, or a --tool-format")
    if not wrong:
        yield Finding("tools", "ok", f"Tool calls are written and read as {spec.name}.")


def _absent_model(source: str) -> Finding:
    """Whether `millrace pull` could download it."""
    from millrace.sources.hub import describe, why_unreachable
    from millrace.sources.known_models import find_known
    from millrace.sources.names import expand_alias, parse_name
    from millrace.sources.resolve import check_is_name

    try:
        check_is_name(source)
        name = None if find_known(expand_alias(source)) else parse_name(expand_alias(source), has_gpu=has_gpu())
        if name is not None and not why_unreachable():
            describe(name)
    except MillraceError as error:
        return Finding("model", "problem", error.message)
    return Finding("model", "warning", f"{source} is not downloaded.", f"millrace pull {source}")


def check_network(config: Config) -> Iterator[Finding]:
    """Whether models can be downloaded."""
    from millrace.sources.hub import hub_address, why_unreachable

    address = hub_address()
    if config.model.offline:
        yield Finding("network", "ok", "Not checked: --offline forbids downloads.")
        return
    reason = why_unreachable()
    if reason:
        text = f"The hub at {address} cannot be reached: {reason}. Only models on this machine work."
        yield Finding(
            "network", "warning", text, "Check network and proxy (HTTPS_PROXY), or name a mirror: HF_ENDPOINT"
        )
    else:
        yield Finding("network", "ok", f"The hub at {address} answers.")


def check_files(config: Config) -> Iterator[Finding]:
    """Files that the settings name."""
    for name, value in (
        ("keys_file", config.server.keys_file),
        ("tls_cert", config.server.tls_cert),
        ("tls_key", config.server.tls_key),
    ):
        if value and not os.access(value, os.R_OK):
            yield Finding(name, "problem", f"{Path(value)} cannot be read.", f"Correct server.{name}")


CHECKS: tuple[Check, ...] = (
    *(check_python, check_torch, check_compiler, check_port, check_disk, check_memory),
    *(check_threads, check_open_files, check_files, check_network, check_model),
)
