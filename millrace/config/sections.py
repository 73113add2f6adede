"""The settings tree: one frozen dataclass per section, each setting with its default, help text and range."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

Dtype = Literal["auto", "float32", "bfloat16", "float16"]
Quantization = Literal["none", "fp8", "int8"]
QuantizationSetting = Literal["auto", "none", "fp8", "int8"]
KvDtype = Literal["auto", "full", "packed", "fp8", "float16", "int8", "int4"]
DeviceKind = Literal["auto", "cpu", "cuda"]
Speculation = Literal["off", "ngram", "suffix", "draft", "medusa", "eagle", "replay", "auto"]
Batching = Literal["continuous", "static"]
PolicyName = Literal["fcfs", "shortest", "feedback", "deadline", "prefix"]
ShareBy = Literal["tenant", "adapter"]
EvictionName = Literal["lru", "frequency", "cost"]
GenerationDefaults = Literal["model", "neutral"]
ManageModels = Literal["local", "always", "never"]
LoadWhen = Literal["auto", "start", "request"]
LogLevel = Literal["debug", "info", "warning", "error"]

DEFAULT_MODEL = "smollm2-135m-instruct"
DEFAULT_MAX_RUNNING = 1024
"""Upper bound of `plan.max_running` when it is chosen automatically. Some devices use fewer."""


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
        "fp8: the layers' weights in 8 bits (needs a GPU with FP8); int8: weights times activations rounded to INT8"
        " (CPU), for a GGUF file's quantised weights and for encoders; auto = int8 for the former on a CPU without AMX"
        " unless --dtype is given, else none",
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
    name: str = setting(
        "", "name of this server and its data directory; if empty, its first model, and -<port> unless that is 8000"
    )
    data_dir: str = setting(
        "",
        "directory for files, batches and stored responses, which several servers may share; if empty, millrace/<name>"
        " in the user's data directory, for this server alone",
    )
    file_limit_mb: int = setting(
        512, "maximum uploaded file in MiB; larger files get a 413 before they are read", minimum=1
    )
    batch_lines: int = setting(64, "maximum number of batch lines that are generated at once", minimum=1)
    keys_file: str = setting("", "TOML file with tenants and their hashed API keys; if empty, no key is required")
    share_prefixes: bool = setting(
        False, "tenants share cached prefixes, so each can time what others sent; off: only a tenant's own are reused"
    )
    gateway_key: str = setting(
        "",
        "secret that a gateway sends in X-Millrace-Gateway-Key, to move streams between replicas and to read KV events;"
        " if empty, operators' keys may, or without keys programs on this machine",
    )
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
    resume_s: float = setting(
        120.0,
        "seconds that requests of an engine that died wait for the next one, which continues them; five times as long"
        " while it shows that it loads; 0 = they end with an error at once",
        minimum=0.0,
    )
    header_limit_kb: int = setting(8, "maximum header line in KiB; longer lines get a 431", minimum=1)
    manage_models: ManageModels = setting(
        "local",
        "who may download and delete models (/api/pull, /api/delete) and add and remove adapters (/v1/adapters);"
        " local: operators' keys, or without keys programs on this machine while the server listens on loopback only",
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
    share_by: ShareBy = setting(
        "tenant",
        "who shares the engine fairly: tenants, or adapters (and the base model), each by its weight in the keys file",
    )
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
        " step times; prompts less urgent than a decoding request leave it two thirds of its pace; 0 = only tokens"
        " limit a step; -1 = automatic: 200 on a CPU, 90 on a GPU",
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
    mirror: bool = setting(
        False, "run every step in a second process too, from the same bytes, and compare what it draws"
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
    kv_disk: str = setting(
        "", "directory on a local disk for KV blocks: they are written from host memory, return, and outlive a restart"
    )
    kv_disk_gib: float = setting(0.0, "size in GiB of the KV blocks in the directory kv_disk, per model", minimum=0.0)
    kv_disk_key: str = setting(
        "",
        "file with a key of at least 32 bytes that encrypts the KV blocks on the disk (AES-256-GCM); empty: none",
    )
    kv_dtype: KvDtype = setting(
        "auto",
        "KV cache format; full: the model's dtype; packed: bfloat16 in 12 bits (GPU); float16: float32 models on a CPU;"
        " auto: packed on a GPU, float16 beside INT8 products, else full; smaller: fp8 (GPU), int8 (CPU), int4",
    )
    kv_eviction: EvictionName = setting(
        "lru",
        "which cached KV block is evicted next; lru: the least recently used; frequency: the least often used, with"
        " age; cost: the cheapest to compute again for its uses, with age",
    )
    kv_retained: float = setting(
        0.25,
        "share of the KV pool, and of host memory and disk for it, that may be kept cached on request (sessions,"
        " /v1/cache, cache_control, prompt_cache_retention)",
        minimum=0.0,
        maximum=0.9,
    )
    kv_export_key: str = setting(
        "",
        "file with a key of at least 32 bytes that signs exported prefixes and sessions; replicas that import them have"
        " the same; empty: nothing is exported or imported",
    )
    kv_state_gib: float = setting(
        0.0,
        "memory in GiB for checkpoints of recurrent states, in models that have some: an equal prompt begins at the"
        " last one; 0 = automatic, a sixteenth of the free memory at most",
        minimum=0.0,
    )
    fraction: float = setting(
        0.0, "share of free memory to use; 0 = 0.9 on a GPU, 0.25 on a CPU", minimum=0.0, maximum=1.0
    )
    reserved_gib: float = setting(
        0.0, "free memory in GiB that is left to other programs before the plan is made", minimum=0.0
    )


@dataclass(frozen=True, slots=True)
class AdapterConfig:
    adapters: str = setting(
        "",
        "LoRA adapters as NAME=PATH, several with commas; a path is a directory saved by PEFT, or org/repo on the hub",
    )
    adapter_dir: str = setting(
        "", "directory that is watched: each directory in it with an adapter_config.json is an adapter of that name"
    )
    max_adapters: int = setting(
        0,
        "adapters that are on the device at once, the others wait in host memory; 0 = 64 if there may be any"
        " (--adapters, --adapter-dir, --allow-adapters), else none",
        minimum=0,
        maximum=4096,
    )
    max_lora_rank: int = setting(64, "largest rank of an adapter", minimum=1, maximum=256)
    adapter_memory: float = setting(2.0, "host memory in GiB for adapters that have been read", minimum=0.01)
    allow_adapters: bool = setting(
        False, "let operators add adapters while the server runs (POST /v1/adapters), from directories of its machine"
    )

    canary_file: str = setting(
        "", "file that keeps canaries of adapters over restarts; if empty, one in the server's data directory"
    )

    @property
    def max_bytes(self) -> int:
        """Of the adapters in host memory, and of each of them."""
        return int(self.adapter_memory * (1 << 30))

    @property
    def num_slots(self) -> int:
        """0: the model takes no adapters."""
        if self.max_adapters:
            return self.max_adapters
        return 64 if self.adapters or self.adapter_dir or self.allow_adapters else 0


@dataclass(frozen=True, slots=True)
class RunConfig:
    device: DeviceKind = setting("auto", "device that runs the model; auto = a GPU if there is one")
    threads: int = setting(
        0,
        "CPU threads for the model, of each process with --tensor-parallel; 0 = the cores that this process may use,"
        " shared by those processes",
        minimum=0,
    )
    tensor_parallel: int = setting(
        1,
        "split the model over so many processes, each with a part of every layer's weights and of the KV cache, and on"
        " a GPU host with a GPU of its own",
        minimum=1,
    )
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
        "",
        "objectives, separated by ;, such as 'ttft p95 < 500 ms; batch: e2e p90 < 9 s; errors < 0.1%' (`millrace slo`)",
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
    adapters: AdapterConfig = field(default_factory=AdapterConfig)
    run: RunConfig = field(default_factory=RunConfig)
    observe: ObserveConfig = field(default_factory=ObserveConfig)


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
