"""One frozen tree of settings, built once, from defaults, then a TOML file, then the command line.

Every leaf knows its help text, its command-line flag and, once loaded, which of the three layers set it.
Nothing below this file reads an environment variable.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import os
import tomllib
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from millrace.errors import ConfigError

Dtype = Literal["auto", "float32", "bfloat16", "float16"]
Quantization = Literal["none", "fp8"]
KvDtype = Literal["auto", "full", "packed", "fp8", "int8"]
DeviceKind = Literal["auto", "cpu", "cuda"]
PolicyName = Literal["fcfs", "shortest", "feedback", "deadline"]
LogLevel = Literal["debug", "info", "warning", "error"]

DEFAULT_MODEL = "smollm2-135m-instruct"
MOST_RUNNING = 1024
"""Requests that run at once on any device where nothing else is asked for: some run fewer."""


def cache_dir() -> Path:
    """Where fetched models are kept: `millrace` in the user's cache directory (XDG_CACHE_HOME if it is absolute)."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "millrace"


def data_dir() -> Path:
    """Where what clients stored is kept: `millrace` in the user's data directory (XDG_DATA_HOME if it is absolute)."""
    base = os.environ.get("XDG_DATA_HOME", "")
    return (Path(base) if os.path.isabs(base) else Path.home() / ".local" / "share") / "millrace"


def child_environment(**changes: str) -> dict[str, str]:
    """This process's environment with `changes`, for a program that we start and that reads its own settings there."""
    return {**os.environ, **changes}


def setting(default: Any, help: str, *, minimum: float | None = None) -> Any:
    """A leaf of the tree: its default, what it means, and its smallest legal value."""
    return field(default=default, metadata={"help": help, "minimum": minimum})


@dataclass(frozen=True, slots=True)
class ModelConfig:
    source: str = setting(DEFAULT_MODEL, "a known name, a directory, a .gguf file, a hub id, or random:<config.json>")
    served_name: str = setting("", "the name clients use; empty takes the source's own name")
    dtype: Dtype = setting("auto", "the type weights are computed in; auto is bfloat16 where the machine is fast at it")
    quantization: Quantization = setting("none", "fp8 holds the layers' weights in eight bits; needs a GPU that can")
    max_context: int = setting(0, "longest prompt + output in tokens; 0 takes the model's own", minimum=0)
    chat_template: str = setting("", "a file with a Jinja chat template; empty takes the model's own")
    seed: int = setting(0, "seed of the weights of random:<config.json>", minimum=0)


@dataclass(frozen=True, slots=True)
class ServerConfig:
    host: str = setting("127.0.0.1", "address to listen on")
    port: int = setting(8000, "port to listen on; 0 picks a free one", minimum=0)
    fronts: int = setting(0, "processes that speak HTTP and share the port; 0 follows the cores", minimum=0)
    in_process: bool = setting(False, "run front and engine in one process (tests, debuggers, tiny machines)")
    body_limit_mb: int = setting(32, "largest request body in MiB; more gets a 413 before it is read", minimum=1)
    stream_buffer_kb: int = setting(256, "unread KiB a slow streaming client may hold before it is dropped", minimum=16)
    request_timeout_s: float = setting(600.0, "deadline of a request that names none, in seconds", minimum=0.1)
    data_dir: str = setting(
        "", "where files, batches and stored responses live; empty takes millrace/<model> in the user's data directory"
    )
    file_limit_mb: int = setting(512, "largest uploaded file in MiB; more gets a 413 before it is read", minimum=1)
    batch_lines: int = setting(64, "most lines of batches that are generated at once", minimum=1)
    keys_file: str = setting("", "a TOML file of tenants and their hashed API keys; empty serves whoever comes")
    ttft_interactive_s: float = setting(
        5.0, "promised wait for the first token; who would wait longer gets a 429; 0 promises nothing", minimum=0.0
    )
    ttft_standard_s: float = setting(120.0, "the same for the standard class", minimum=0.0)
    ttft_batch_s: float = setting(600.0, "the same for the batch class", minimum=0.0)
    tls_cert: str = setting("", "a file with the certificate chain (PEM); empty speaks plain HTTP")
    tls_key: str = setting("", "a file with the certificate's private key (PEM)")
    cors_origins: str = setting("", "origins whose web pages may call, separated by commas; * is all")
    header_limit_kb: int = setting(8, "largest header line in KiB; more gets a 431", minimum=1)
    drain_timeout_s: float = setting(30.0, "seconds that running requests get to finish after SIGTERM", minimum=0.0)


@dataclass(frozen=True, slots=True)
class PlanConfig:
    max_running: int = setting(0, "most requests that run at once; 0 chooses for the device", minimum=0)
    max_waiting: int = setting(16384, "most requests that wait; more get a 429", minimum=1)
    policy: PolicyName = setting("fcfs", "who goes first within a class and a tenant")
    aging_s: float = setting(30.0, "a request counts as one class more urgent for each such wait", minimum=0.1)
    token_budget: int = setting(
        0, "most tokens of prompts in one step; running requests add one each; 0 chooses for the device", minimum=0
    )
    mixed_budget: int = setting(
        0,
        "most tokens, all counted, in a step that also decodes, to keep streams smooth; 0 chooses; no limit from"
        " token_budget on",
        minimum=0,
    )
    block_size: int = setting(16, "tokens in one KV block", minimum=1)
    prefix_cache: bool = setting(True, "reuse the KV of equal prompt prefixes")


@dataclass(frozen=True, slots=True)
class MemoryConfig:
    kv_gib: float = setting(0.0, "memory of the KV pool in GiB; 0 takes what the fraction leaves", minimum=0.0)
    kv_tokens: int = setting(0, "tokens the KV pool holds; overrides kv_gib; 0 leaves it to kv_gib", minimum=0)
    kv_dtype: KvDtype = setting(
        "auto",
        "how KV is kept; full: the model's dtype; packed: bfloat16 in 12 bits (GPU); auto: packed, else full;"
        " half the size: fp8 (GPU), int8 (CPU)",
    )
    fraction: float = setting(0.0, "share of the free memory to use; 0 is 0.9 on a GPU, 0.25 on a CPU", minimum=0.0)


@dataclass(frozen=True, slots=True)
class RunConfig:
    device: DeviceKind = setting("auto", "where the model runs; auto takes a GPU if there is one")
    threads: int = setting(0, "CPU threads for the model; 0 takes the cores this process may use", minimum=0)
    deterministic: bool = setting(False, "use only op versions whose result for a row does not depend on the batch")
    graphs: bool = setting(True, "replay captured CUDA graphs; off launches every kernel from the host, for debugging")


@dataclass(frozen=True, slots=True)
class ObserveConfig:
    log_level: LogLevel = setting("info", "debug, info, warning or error")
    audit_log: str = setting("", "a file that gets one JSON line per request (never its text); empty writes none")
    log_requests: bool = setting(False, "one log line per finished request (never its text)")


@dataclass(frozen=True, slots=True)
class Config:
    model: ModelConfig = field(default_factory=ModelConfig)
    server: ServerConfig = field(default_factory=ServerConfig)
    plan: PlanConfig = field(default_factory=PlanConfig)
    memory: MemoryConfig = field(default_factory=MemoryConfig)
    run: RunConfig = field(default_factory=RunConfig)
    observe: ObserveConfig = field(default_factory=ObserveConfig)


@dataclass(frozen=True, slots=True)
class Leaf:
    """One setting as the command line and `millrace config` see it."""

    section: str
    name: str
    kind: Any
    default: Any
    help: str
    minimum: float | None

    @property
    def key(self) -> str:
        return f"{self.section}.{self.name}"

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")


@dataclass(frozen=True, slots=True)
class LoadedConfig:
    """The tree, and for every key which layer set it: "default", the TOML file's path, or "command line"."""

    config: Config
    sources: Mapping[str, str]


def leaves() -> dict[str, Leaf]:
    """Every setting by its dotted key, in the order of the tree. Leaf names are unique, so flags need no section."""
    found: dict[str, Leaf] = {}
    for section in fields(Config):
        section_type = typing.get_type_hints(Config)[section.name]
        kinds = typing.get_type_hints(section_type)
        for leaf in fields(section_type):
            meta = leaf.metadata
            entry = Leaf(section.name, leaf.name, kinds[leaf.name], leaf.default, meta["help"], meta["minimum"])
            found[entry.key] = entry
    return found


def load_config(toml_path: Path | None = None, command_line: Mapping[str, object] | None = None) -> LoadedConfig:
    """Merge the three layers. `command_line` maps dotted keys to strings or to values of the right type."""
    known = leaves()
    values = {key: leaf.default for key, leaf in known.items()}
    sources = dict.fromkeys(known, "default")
    layers: list[tuple[str, Mapping[str, object]]] = []
    if toml_path is not None:
        layers.append((str(toml_path), _read_toml(toml_path)))
    layers.append(("command line", command_line or {}))
    for origin, layer in layers:
        for key, raw in layer.items():
            if key not in known:
                raise ConfigError(f"{origin}: there is no setting '{key}'.{_nearest(key, known)}", param=key)
            values[key] = _convert(known[key], raw, origin)
            sources[key] = origin
    config = _build(values)
    _check_contradictions(config)
    return LoadedConfig(config, types.MappingProxyType(sources))


def _read_toml(path: Path) -> dict[str, object]:
    try:
        tree = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ConfigError(f"There is no settings file {path}.") from error
    except OSError as error:
        raise ConfigError(f"The settings file {path} cannot be read: {error.strerror}.") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from error
    flat: dict[str, object] = {}
    for section, table in tree.items():
        if not isinstance(table, dict):
            hint = _nearest(section, leaves())
            raise ConfigError(f"{path}: '{section}' must be in a section, such as [server].{hint}")
        flat.update({f"{section}.{name}": value for name, value in table.items()})
    return flat


def _nearest(key: str, known: Mapping[str, Leaf]) -> str:
    by_name = {leaf.name: full for full, leaf in known.items()}
    in_another_section = by_name.get(key.rpartition(".")[2])
    close = [in_another_section] if in_another_section else difflib.get_close_matches(key, known, n=1, cutoff=0.6)
    if not close:
        names = difflib.get_close_matches(key.rpartition(".")[2], by_name, n=1, cutoff=0.6)
        close = [by_name[name] for name in names]
    return f" Did you mean '{close[0]}'?" if close else " `millrace config` lists them all."


def _convert(leaf: Leaf, raw: object, origin: str) -> object:
    value = _parse(leaf, raw, origin)
    if isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(f"{origin}: {leaf.key} is {value}; it must be a finite number.", param=leaf.key)
    if leaf.minimum is not None and isinstance(value, (int, float)) and not value >= leaf.minimum:
        raise ConfigError(f"{origin}: {leaf.key} is {value}; it must be at least {leaf.minimum}.", param=leaf.key)
    return value


def _parse(leaf: Leaf, raw: object, origin: str) -> object:
    if typing.get_origin(leaf.kind) is Literal:
        choices = typing.get_args(leaf.kind)
        if raw in choices:
            return raw
        raise ConfigError(f"{origin}: {leaf.key} is {raw!r}; it must be one of {', '.join(choices)}.", param=leaf.key)
    if leaf.kind is bool:
        if isinstance(raw, bool):
            return raw
        if isinstance(raw, str) and raw.lower() in ("true", "false"):
            return raw.lower() == "true"
        raise ConfigError(f"{origin}: {leaf.key} is {raw!r}; it must be true or false.", param=leaf.key)
    if leaf.kind is str:
        if isinstance(raw, str):
            return raw
        raise ConfigError(f"{origin}: {leaf.key} is {raw!r}; it must be a text.", param=leaf.key)
    wanted = "a whole number" if leaf.kind is int else "a number"
    if isinstance(raw, bool) or not isinstance(raw, (str, int, float)) or (leaf.kind is int and isinstance(raw, float)):
        raise ConfigError(f"{origin}: {leaf.key} is {raw!r}; it must be {wanted}.", param=leaf.key)
    try:
        return leaf.kind(raw)
    except ValueError as error:
        raise ConfigError(f"{origin}: {leaf.key} is {raw!r}; it must be {wanted}.", param=leaf.key) from error


def _build(values: Mapping[str, object]) -> Config:
    sections = {}
    hints = typing.get_type_hints(Config)
    for section in fields(Config):
        section_type = hints[section.name]
        own = {leaf.name: values[f"{section.name}.{leaf.name}"] for leaf in fields(section_type)}
        sections[section.name] = section_type(**own)
    return Config(**sections)


def _check_contradictions(config: Config) -> None:
    plan, memory, server = config.plan, config.memory, config.server
    if plan.token_budget and plan.token_budget < plan.max_running:
        raise ConfigError(
            f"plan.token_budget is {plan.token_budget}, below plan.max_running {plan.max_running}: every running"
            f" request adds a token to a step, which could then be more than twice its budget. Set token_budget to at"
            f" least {plan.max_running}, or max_running to at most {plan.token_budget}.",
            param="plan.token_budget",
        )
    if memory.fraction > 1.0:
        raise ConfigError(f"memory.fraction is {memory.fraction}; it must be at most 1.0.", param="memory.fraction")
    if memory.kv_gib and memory.kv_tokens:
        raise ConfigError("memory.kv_gib and memory.kv_tokens both set the KV pool; give one.", param="memory.kv_gib")
    if server.port > 65535:
        raise ConfigError(f"server.port is {server.port}; it must be at most 65535.", param="server.port")
    if server.in_process and server.fronts > 1:
        raise ConfigError(
            f"server.in_process runs one front, but server.fronts is {server.fronts}; drop one of the two.",
            param="server.fronts",
        )


def num_fronts(config: Config, num_cores: int) -> int:
    """As many fronts as were asked for; by default three for each eight cores: on sixteen, four were all busy at
    250,000 tokens a second while the engine was not, and the rest of the machine idled."""
    if config.server.in_process:
        return 1
    return config.server.fronts or min(max(1, num_cores * 3 // 8), 8)


def replace(config: Config, **changes: object) -> Config:
    """A copy with dotted keys written with two underscores: `replace(config, model__dtype="float32")`."""
    values = {key: getattr(getattr(config, leaf.section), leaf.name) for key, leaf in leaves().items()}
    for name, value in changes.items():
        key = name.replace("__", ".")
        if key not in values:
            raise ConfigError(f"There is no setting '{key}'.{_nearest(key, leaves())}", param=key)
        values[key] = _convert(leaves()[key], value, "argument")
    config = _build(values)
    _check_contradictions(config)
    return config


def as_dict(config: Config) -> dict[str, Any]:
    return dataclasses.asdict(config)


def from_dict(tree: Mapping[str, Mapping[str, object]]) -> Config:
    """The inverse of `as_dict`, for handing a config to another process."""
    flat = {f"{section}.{name}": value for section, table in tree.items() for name, value in table.items()}
    return load_config(None, flat).config
