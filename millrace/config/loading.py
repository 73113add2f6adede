"""All settings as one frozen tree, merged from the defaults, a TOML file, the environment and the command line.

Each setting has a help text, a command-line flag and, once loaded, the layer that set it.
This is the only module that reads environment variables.
"""

from __future__ import annotations

import dataclasses
import difflib
import os
import sys
import tomllib
import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, Literal

from millrace.errors import ConfigError

Dtype = Literal["auto", "float32", "bfloat16", "float16"]
Quantization = Literal["none", "fp8", "int8"]
QuantizationSetting = Literal["auto", "none", "fp8", "int8"]
KvDtype = Literal["auto", "full", "packed", "fp8", "float16", "int8"]
DeviceKind = Literal["auto", "cpu", "cuda"]
Speculation = Literal["off", "ngram", "suffix", "draft", "medusa", "eagle", "replay", "auto"]
Batching = Literal["continuous", "static"]
PolicyName = Literal["fcfs", "shortest", "feedback", "deadline"]
GenerationDefaults = Literal["model", "neutral"]
ManageModels = Literal["local", "always", "never"]
LoadWhen = Literal["auto", "start", "request"]
LogLevel = Literal["debug", "info", "warning", "error"]

DEFAULT_MODEL = "smollm2-135m-instruct"
DEFAULT_MAX_RUNNING = 1024
"""Upper bound of `plan.max_running` when it is chosen automatically. Some devices use fewer."""


ENVIRONMENT_PREFIX = "MILLRACE_"
CONFIG_VARIABLE = "MILLRACE_CONFIG"
API_KEY_VARIABLE = "MILLRACE_API_KEY"
_OTHER_VARIABLES = (CONFIG_VARIABLE, API_KEY_VARIABLE, "MILLRACE_FUZZ", "MILLRACE_REQUESTS", "MILLRACE_OPENAI_OPENAPI")
"""Variables that are no settings: the settings file, the key of our client commands, and those of the test suite."""


def client_api_key() -> str:
    """The API key that `chat`, `ps` and other client commands send unless one is given."""
    return os.environ.get(API_KEY_VARIABLE, "")


def cache_dir() -> Path:
    """Directory of downloaded models: `millrace` in the user's cache directory (XDG_CACHE_HOME if it is absolute)."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "millrace"


def settings_dir() -> Path:
    """Directory of the user's own settings, such as aliases (XDG_CONFIG_HOME if it is absolute)."""
    base = os.environ.get("XDG_CONFIG_HOME", "")
    return (Path(base) if os.path.isabs(base) else Path.home() / ".config") / "millrace"


def data_dir() -> Path:
    """Directory of clients' stored data: `millrace` in the user's data directory (XDG_DATA_HOME if it is absolute)."""
    base = os.environ.get("XDG_DATA_HOME", "")
    return (Path(base) if os.path.isabs(base) else Path.home() / ".local" / "share") / "millrace"


def allows_colour() -> bool:
    """False if `NO_COLOR` is set (https://no-color.org) or the terminal is dumb."""
    return not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def child_environment(**changes: str) -> dict[str, str]:
    """This process's environment with `changes`, for a child process that is configured through it."""
    return {**os.environ, **changes}


def setting(default: Any, help: str, *, minimum: float | None = None, maximum: float | None = None) -> Any:
    """Declare one setting: its default, its help text and, for a number, its range."""
    return field(default=default, metadata={"help": help, "minimum": minimum, "maximum": maximum})


@dataclass(frozen=True, slots=True)
class ModelConfig:
    source: str = setting(
        DEFAULT_MODEL,
        "model name, directory, .gguf file, hub name (org/model[@revision][:quantisation]) or random:<config.json>",
    )
    offline: bool = setting(False, "never download: use only models that are on this machine")
    served_name: str = setting("", "model name in the API; if empty, the name of the source")
    dtype: Dtype = setting(
        "auto",
        "compute dtype; auto = float32 with INT8 products of quantised weights (see --quantization), else bfloat16"
        " where the hardware has instructions for it, else float32",
    )
    quantization: QuantizationSetting = setting(
        "auto",
        "fp8: the layers' weights in 8 bits (needs a GPU with FP8); int8: a GGUF file's quantised weights times"
        " activations rounded to INT8 (CPU); auto = int8 on a CPU without AMX unless --dtype is given, else none",
    )
    max_context: int = setting(0, "maximum tokens of prompt and output together; 0 = the model's limit", minimum=0)
    chat_template: str = setting("", "file with a Jinja chat template; if empty, the model's own template")
    generation_defaults: GenerationDefaults = setting(
        "model",
        "sampling of requests that set none: model = what the model's authors recommend; neutral = temperature 1,"
        " nothing cut",
    )
    tool_format: str = setting(
        "auto", "format of tool calls, such as hermes or mistral; auto = as the chat template writes them"
    )
    reasoning_format: str = setting(
        "auto", "markers of the model's reasoning, such as think; auto = as in the chat template; none = no reasoning"
    )
    seed: int = setting(0, "seed of the weights of random:<config.json>", minimum=0)
    aliases: str = setting("", "further names of the model in the API, separated by commas")
    load: LoadWhen = setting(
        "auto", "when to load the model: at start or for its first request; auto: at start if it is the first model"
    )
    keep_alive_s: float = setting(
        -1.0, "seconds after its last request after which the model is unloaded; -1 = never", minimum=-1.0
    )


@dataclass(frozen=True, slots=True)
class ServerConfig:
    host: str = setting("127.0.0.1", "address to listen on")
    port: int = setting(8000, "port to listen on; 0 = any free port", minimum=0, maximum=65535)
    fronts: int = setting(0, "number of HTTP processes, which share the port; 0 = automatic, by cores", minimum=0)
    in_process: bool = setting(False, "run front and engine in one process (for tests, debuggers, small machines)")
    body_limit_mb: int = setting(
        32, "maximum request body in MiB; larger bodies get a 413 before they are read", minimum=1
    )
    stream_buffer_kb: int = setting(256, "unread KiB of a stream after which its client is disconnected", minimum=16)
    request_timeout_s: float = setting(600.0, "deadline in seconds for requests that set none", minimum=0.1)
    data_dir: str = setting(
        "", "directory for files, batches and stored responses; if empty, millrace/<model> in the user's data directory"
    )
    file_limit_mb: int = setting(
        512, "maximum uploaded file in MiB; larger files get a 413 before they are read", minimum=1
    )
    batch_lines: int = setting(64, "maximum number of batch lines that are generated at once", minimum=1)
    keys_file: str = setting("", "TOML file with tenants and their hashed API keys; if empty, no key is required")
    ttft_interactive_s: float = setting(
        5.0,
        "promised seconds to the first token; interactive requests that would wait longer get a 429; 0 = no promise",
        minimum=0.0,
    )
    ttft_standard_s: float = setting(120.0, "the same for standard requests", minimum=0.0)
    ttft_batch_s: float = setting(600.0, "the same for batch requests", minimum=0.0)
    tls_cert: str = setting("", "file with the TLS certificate chain (PEM); if empty, plain HTTP")
    tls_key: str = setting("", "file with the private key of the TLS certificate (PEM)")
    cors_origins: str = setting("", "origins whose web pages may call the API, separated by commas; * = all")
    allow_logits_processors: str = setting(
        "", "functions (package.module.function) that requests may name in logits_processors, separated by commas"
    )
    max_loaded: int = setting(
        0, "maximum number of models loaded at once; 0 = as many as fit in memory", minimum=0, maximum=1000
    )
    spare_engine: bool = setting(
        True, "while a model is not loaded, keep a process without a model ready, which halves the time to load it"
    )
    loading_wait_s: float = setting(
        120.0, "seconds that a request waits while its model is being loaded, before it gets a 503", minimum=0.0
    )
    header_limit_kb: int = setting(8, "maximum header line in KiB; longer lines get a 431", minimum=1)
    manage_models: ManageModels = setting(
        "local",
        "who may download and delete models (/api/pull, /api/delete); local: operators' keys, or without keys programs"
        " on this machine while the server listens on loopback only",
    )
    drain_timeout_s: float = setting(30.0, "seconds that running requests get to finish after SIGTERM", minimum=0.0)


@dataclass(frozen=True, slots=True)
class PlanConfig:
    max_running: int = setting(0, "maximum number of running requests; 0 = automatic", minimum=0)
    max_waiting: int = setting(16384, "maximum number of waiting requests; further requests get a 429", minimum=1)
    batching: Batching = setting(
        "continuous",
        "static: a batch starts when the one before has ended, as older servers do; only to show the difference",
    )
    policy: PolicyName = setting("fcfs", "order of requests within a priority class and tenant")
    aging_s: float = setting(
        30.0, "seconds of waiting after which a request is promoted by one priority class", minimum=0.1
    )
    token_budget: int = setting(
        0, "maximum prompt tokens in a step; each running request adds one token; 0 = automatic", minimum=0
    )
    mixed_budget: int = setting(
        0,
        "maximum tokens in a step that contains decoding requests (keeps streaming smooth); 0 = automatic;"
        " token_budget or more = no limit",
        minimum=0,
    )
    step_ms: float = setting(
        -1.0,
        "milliseconds that a step with decoding requests should take at most: its prompt tokens follow from measured"
        " step times; 0 = only tokens limit a step; -1 = automatic: 200 on a CPU, 90 on a GPU",
        minimum=-1.0,
    )
    block_size: int = setting(16, "tokens per KV block", minimum=1)
    prefix_cache: bool = setting(True, "reuse the KV cache of equal prompt prefixes")
    speculate: Speculation = setting(
        "off",
        "guess the next tokens and verify several in one step; never changes an answer; ngram: what followed the last"
        " few tokens before; suffix: what followed the longest text seen before; draft, medusa, eagle: a drafter that"
        " is a model (--drafter); auto: suffix and, where it pays, --drafter (on a GPU: --drafter, else suffix);"
        " replay: for benchmarks, a request's prediction token by token",
    )
    step_log: str = setting(
        "", "ever growing file of all steps, with their token ids, for `millrace bench replay`; one per model"
    )
    drafter: str = setting(
        "",
        "for --speculate draft: a smaller model with the same tokens; for medusa and eagle: trained heads, as a"
        " directory or a hub name; for auto: any of these",
    )
    max_drafts: int = setting(
        15,
        "maximum guessed tokens per request and step; how many pay is measured; a GPU takes at most 7",
        minimum=1,
        maximum=15,
    )
    draft_tokens: int = setting(
        0,
        "guess always this many tokens per request and step, whether or not they pay; 0 = as measured; a GPU takes at"
        " most 7",
        minimum=0,
        maximum=15,
    )


@dataclass(frozen=True, slots=True)
class MemoryConfig:
    kv_gib: float = setting(0.0, "size of the KV pool in GiB; 0 = as much as the fraction allows", minimum=0.0)
    kv_tokens: int = setting(0, "size of the KV pool in tokens, instead of kv_gib; 0 = not set", minimum=0)
    kv_host_gib: float = setting(
        0.0,
        "host memory in GiB for KV blocks that the pool evicts: they return instead of being computed again; 0 = none",
        minimum=0.0,
    )
    kv_dtype: KvDtype = setting(
        "auto",
        "KV cache format; full: the model's dtype; packed: bfloat16 in 12 bits (GPU); float16: float32 models on a CPU;"
        " auto: packed on a GPU, float16 beside INT8 products, else full; smallest: fp8 (GPU), int8 (CPU)",
    )
    fraction: float = setting(
        0.0, "share of free memory to use; 0 = 0.9 on a GPU, 0.25 on a CPU", minimum=0.0, maximum=1.0
    )
    reserved_gib: float = setting(
        0.0, "free memory in GiB that is left to other programs before the plan is made", minimum=0.0
    )


@dataclass(frozen=True, slots=True)
class RunConfig:
    device: DeviceKind = setting("auto", "device that runs the model; auto = a GPU if there is one")
    threads: int = setting(0, "CPU threads for the model; 0 = the cores that this process may use", minimum=0)
    deterministic: bool = setting(False, "use only op versions whose result for a row does not depend on the batch")
    graphs: bool = setting(True, "replay captured CUDA graphs; off = launch each kernel from the host, for debugging")


@dataclass(frozen=True, slots=True)
class ObserveConfig:
    log_level: LogLevel = setting("info", "least severe level that is logged")
    audit_log: str = setting("", "file that gets one JSON line per request, never its text; if empty, none is written")
    figures: bool = setting(
        True, "count what steps and requests do, for /metrics, /v1/stats and /v1/steps; off only to measure the cost"
    )
    log_requests: bool = setting(False, "log one line per finished request, never its text")
    slos: str = setting(
        "", "objectives, separated by ;, such as 'ttft p95 < 500 ms; interactive: itl p99 < 80 ms' (`millrace slo`)"
    )
    slo_ready: bool = setting(False, "/ready fails while an objective's error budget burns fast")
    slo_admission: bool = setting(
        False, "refuse batch requests while the error budget of a more urgent class burns fast (429)"
    )
    price_per_hour: float = setting(0.0, "price of this machine in dollars per hour, for `millrace cost`", minimum=0.0)
    otlp_url: str = setting(
        "", "OTLP/HTTP receiver of OpenTelemetry spans, such as http://127.0.0.1:4318; if empty, none are sent"
    )
    otlp_steps: bool = setting(False, "send a span for each step of the engines too, to otlp_url")


@dataclass(frozen=True, slots=True)
class Config:
    model: ModelConfig = field(default_factory=ModelConfig)
    server: ServerConfig = field(default_factory=ServerConfig)
    plan: PlanConfig = field(default_factory=PlanConfig)
    memory: MemoryConfig = field(default_factory=MemoryConfig)
    run: RunConfig = field(default_factory=RunConfig)
    observe: ObserveConfig = field(default_factory=ObserveConfig)


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting of the tree: its key, type, default, help text and range."""

    section: str
    name: str
    kind: Any
    default: Any
    help: str
    minimum: float | None = None
    maximum: float | None = None

    @property
    def key(self) -> str:
        return f"{self.section}.{self.name}"

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        """The environment variable that sets it."""
        return ENVIRONMENT_PREFIX + self.name.upper()

    @property
    def expected(self) -> str:
        """The legal values in words, for errors."""
        if typing.get_origin(self.kind) is Literal:
            return f"one of {', '.join(typing.get_args(self.kind))}"
        words = {bool: "true or false", str: "a string", int: "a whole number", float: "a finite number"}[self.kind]
        if self.minimum is not None and self.maximum is not None:
            return f"{words} from {self.minimum:g} to {self.maximum:g}"
        return words if self.minimum is None else f"{words} of at least {self.minimum:g}"

    def convert(self, raw: object, shown_as: str) -> object:
        """`raw`, or the value that a string spells. `shown_as` names the setting in the error."""
        import msgspec  # Not at the top of the file: `--help` should not pay for the import.

        kind = self.kind
        if kind in (int, float):
            largest = sys.float_info.max if kind is float else None  # Excludes infinity.
            bounds = msgspec.Meta(ge=self.minimum, le=largest if self.maximum is None else self.maximum)
            kind = Annotated[kind, bounds]
        try:
            return msgspec.convert(raw, kind, strict=not isinstance(raw, str))
        except msgspec.ValidationError as error:
            raise ConfigError(f"{shown_as} is {raw!r}; it must be {self.expected}.", param=self.key) from error


@dataclass(frozen=True, slots=True)
class LoadedConfig:
    """The tree, and for each key the layer that set it: "default", the path of the TOML file, the name of a variable,
    or "command line"."""

    config: Config
    sources: Mapping[str, str]
    models: Mapping[str, Mapping[str, object]] = field(default_factory=dict)
    """The tables [models.NAME] of the TOML file: settings by name, without their section."""


def all_settings() -> dict[str, Setting]:
    """Every setting by its dotted key, in the order of the tree. Names are unique, so flags need no section."""
    found: dict[str, Setting] = {}
    for section, section_type in typing.get_type_hints(Config).items():
        kinds = typing.get_type_hints(section_type)
        for declared in fields(section_type):
            entry = Setting(section, declared.name, kinds[declared.name], declared.default, **declared.metadata)
            found[entry.key] = entry
    return found


def load_config(
    toml_path: Path | None = None, values: Mapping[str, object] | None = None, *, origin: str = "command line"
) -> LoadedConfig:
    """Merge defaults, TOML file, `MILLRACE_*` variables and `values` (dotted key to string or value of the right type).

    `origin` names the layer of `values` in errors and in `sources`. Without a path, MILLRACE_CONFIG names the file.
    """
    known = all_settings()
    merged = {key: entry.default for key, entry in known.items()}
    sources = dict.fromkeys(known, "default")
    layers: list[tuple[str, Mapping[str, object]]] = []
    models: dict[str, dict[str, object]] = {}
    if toml_path is None and os.environ.get(CONFIG_VARIABLE):
        toml_path = Path(os.environ[CONFIG_VARIABLE])
    if toml_path is not None:
        flat = _read_toml(toml_path)
        models = _model_tables(toml_path, flat)
        layers.append((str(toml_path), flat))
    layers += [(variable, {key: text}) for variable, key, text in _from_environment(known)]
    layers.append((origin, values or {}))
    for layer_origin, layer in layers:
        for key, raw in layer.items():
            if key not in known:
                raise ConfigError(f"{layer_origin}: there is no setting '{key}'.{_nearest(key, known)}", param=key)
            merged[key] = known[key].convert(raw, f"{layer_origin}: {key}")
            sources[key] = layer_origin
    return LoadedConfig(_build(merged), types.MappingProxyType(sources), models)


def _from_environment(known: Mapping[str, Setting]) -> Iterator[tuple[str, str, str]]:
    """(variable, key, text) of every `MILLRACE_*` variable. Raises for one that no setting has."""
    by_variable = {entry.variable: key for key, entry in known.items()}
    by_variable[ENVIRONMENT_PREFIX + "MODEL"] = "model.source"
    for variable, text in sorted(os.environ.items()):
        if not variable.startswith(ENVIRONMENT_PREFIX) or variable in _OTHER_VARIABLES:
            continue
        if variable not in by_variable:
            close = difflib.get_close_matches(variable, by_variable, n=1, cutoff=0.6)
            hint = f" Did you mean {close[0]}?" if close else ""
            raise ConfigError(f"The environment variable {variable} is no setting.{hint} Unset or rename it.")
        yield variable, by_variable[variable], text


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
            hint = _nearest(section, all_settings())
            raise ConfigError(f"{path}: '{section}' must be in a section, such as [server].{hint}")
        flat.update({f"{section}.{name}": value for name, value in table.items()})
    return flat


def _model_tables(path: Path, flat: dict[str, object]) -> dict[str, dict[str, object]]:
    """Take the tables [models.NAME] out of the file's settings."""
    tables: dict[str, dict[str, object]] = {}
    for key in [key for key in flat if key.startswith("models.")]:
        name, table = key.removeprefix("models."), flat.pop(key)
        if not isinstance(table, dict):
            raise ConfigError(f"{path}: '{key}' must be a table, such as [models.chat].", param=key)
        tables[name] = table
    return tables


def _nearest(key: str, known: Mapping[str, Setting]) -> str:
    """A hint with the setting that `key` probably means."""
    by_name = {entry.name: full for full, entry in known.items()}
    in_another_section = by_name.get(key.rpartition(".")[2])
    close = [in_another_section] if in_another_section else difflib.get_close_matches(key, known, n=1, cutoff=0.6)
    if not close:
        names = difflib.get_close_matches(key.rpartition(".")[2], by_name, n=1, cutoff=0.6)
        close = [by_name[name] for name in names]
    return f" Did you mean '{close[0]}'?" if close else " `millrace config` lists all settings."


def _build(values: Mapping[str, object]) -> Config:
    """The tree of these values, one for each key, after a check that they fit together."""
    sections = {}
    for section, section_type in typing.get_type_hints(Config).items():
        sections[section] = section_type(
            **{declared.name: values[f"{section}.{declared.name}"] for declared in fields(section_type)}
        )
    config = Config(**sections)
    _check_combinations(config)
    return config


def _check_combinations(config: Config) -> None:
    plan, memory, server = config.plan, config.memory, config.server
    if plan.token_budget and plan.token_budget < plan.max_running:
        raise ConfigError(
            f"plan.token_budget is {plan.token_budget}, below plan.max_running {plan.max_running}: each running request"
            f" adds one token to a step, so a step could exceed twice its budget. Set token_budget to at least"
            f" {plan.max_running}, or max_running to at most {plan.token_budget}.",
            param="plan.token_budget",
        )
    if memory.kv_gib and memory.kv_tokens:
        raise ConfigError(
            f"memory.kv_gib is {memory.kv_gib:g} and memory.kv_tokens is {memory.kv_tokens}, but both set the size of"
            " the KV pool; set only one.",
            param="memory.kv_gib",
        )
    if memory.kv_host_gib and not plan.prefix_cache:
        raise ConfigError(
            f"memory.kv_host_gib is {memory.kv_host_gib:g}, but plan.prefix_cache is off, so no KV block is ever used"
            " again; set only one of the two.",
            param="memory.kv_host_gib",
        )
    if server.in_process and server.fronts > 1:
        raise ConfigError(
            f"server.in_process runs one front, but server.fronts is {server.fronts}; set only one of the two.",
            param="server.fronts",
        )


def num_fronts(config: Config, num_cores: int) -> int:
    """Number of fronts to start; by default 3 per 8 cores, at least 1 and at most 8.

    On 16 cores at 250,000 tokens/s, 4 fronts were saturated while the engine and the other cores had time to spare.
    """
    if config.server.in_process:
        return 1
    return config.server.fronts or min(max(1, num_cores * 3 // 8), 8)


def allowed_processors(config: Config) -> tuple[str, ...]:
    """Dotted names of the logits processors that requests may use."""
    names = (name.strip() for name in config.server.allow_logits_processors.split(","))
    return tuple(name for name in names if name)


def adopt_environment(pid: int) -> None:
    """Use the `MILLRACE_*` variables of another process instead of our own, to see the settings as it would."""
    items = (item.partition("=") for item in Path(f"/proc/{pid}/environ").read_text("utf-8", "replace").split("\0"))
    theirs = {name: value for name, _, value in items if name.startswith(ENVIRONMENT_PREFIX)}
    for name in [name for name in os.environ if name.startswith(ENVIRONMENT_PREFIX)]:
        del os.environ[name]
    os.environ.update(theirs)


def replace(config: Config, **changes: object) -> Config:
    """A copy with some settings changed. Keys have two underscores for the dot: `replace(config, model__dtype=…)`."""
    known = all_settings()
    values = {key: getattr(getattr(config, entry.section), entry.name) for key, entry in known.items()}
    for name, value in changes.items():
        key = name.replace("__", ".")
        if key not in values:
            raise ConfigError(f"There is no setting '{key}'.{_nearest(key, known)}", param=key)
        values[key] = known[key].convert(value, key)
    return _build(values)


def as_dict(config: Config) -> dict[str, Any]:
    return dataclasses.asdict(config)


def from_dict(tree: Mapping[str, Mapping[str, object]]) -> Config:
    """The inverse of `as_dict`, for passing a config to another process."""
    known = all_settings()
    flat = {f"{section}.{name}": value for section, table in tree.items() for name, value in table.items()}
    return _build({key: known[key].convert(value, key) for key, value in flat.items()})
