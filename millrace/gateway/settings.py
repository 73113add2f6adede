"""Settings of a gateway, from options and from the tables `gateway` and `replicas` of a fleet's file."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

import msgspec

from millrace.errors import ConfigError
from millrace.model_router.router import RouterSettings

ReplicaKind = Literal["millrace", "vllm", "llama.cpp", "ollama"]


class ReplicaSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    url: str
    name: str = ""
    """By default the host and port of its URL."""
    kind: ReplicaKind = "millrace"
    weight: float = 1.0
    region: str = ""
    group: str = ""
    """Replicas of one release or one set of options, for rollouts and shadow traffic."""
    long_jobs: bool = False
    """Takes the long jobs, and nothing else while another replica can."""


class GatewaySettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    host: str = "127.0.0.1"
    port: int = 8080
    reuse_port: bool = False
    """Several gateways of this machine share the port; the kernel spreads connections."""
    workers: int = 1
    """Processes of this gateway, which share the port."""
    policy: str = "prefix"
    region: str = ""
    keys_file: str = ""
    """API keys that clients need here. Without it their keys go on to the replicas."""
    share_prefixes: bool = False
    """Let tenants of the keys file share cached prefixes, unless their `private_cache` says otherwise."""
    replica_key: str = ""
    """API key that replicas get instead of the client's."""
    replica_ca: str = ""
    """File (PEM) with certificates that replicas on https may be signed by, beside those that the system trusts."""
    gateway_key: str = ""
    """The replicas' `--gateway-key`: lets them send KV events and token ids, and continue streams."""
    max_attempts: int = 3
    """Replicas that a request may try before its first token."""
    max_resumes: int = 8
    """Times that a stream may move to another replica."""
    connect_s: float = 5.0
    probe_s: float = 1.0
    probe_timeout_s: float = 5.0
    stall_s: float = 30.0
    """A replica whose streams all stand still for this long after their first token is ejected."""
    head_s: float = 15.0
    """A Millrace replica that has not begun a stream after this time has failed; it sends a head within 2 s, however
    long the prompt is."""
    answer_s: float = 1800.0
    """The same for whole answers and for streams of other servers, whose head may come with the first token."""
    outlier_factor: float = 5.0
    """A replica whose time per token is this many times the median of the others is ejected; 0: never."""
    max_failures: int = 3
    eject_s: float = 5.0
    ramp_s: float = 10.0
    max_open: int = 4096
    """Open requests per replica; above, others are chosen."""
    hedge_ms: float = 0.0
    """A request without a first byte after this time is sent to a second replica too; 0: never."""
    long_tokens: int = 32_768
    """Requests of this many prompt and output tokens, and those of priority batch, are long jobs."""
    kv_fetch_tokens: int = 512
    """If another replica probably has this many more tokens of a prompt cached than the chosen one, that one may fetch
    them there; 0: never."""
    decision_log: str = ""
    otlp_url: str = ""
    """OTLP/HTTP receiver of a span per request and per routing decision."""
    limits_store: str = ""
    """Where gateways share quotas and budgets: sqlite:PATH or redis://HOST:PORT; empty: each counts its own."""
    router: RouterSettings | None = None
    """Chooses a model for requests with `model: "auto"`."""
    discover: str = ""
    """HOST:PORT whose addresses in DNS are replicas."""
    discover_s: float = 5.0
    body_limit_mb: int = 64
    drain_s: float = 30.0
    stream_buffer_kb: int = 256


def replica_name(settings: ReplicaSettings) -> str:
    return settings.name or urlsplit(settings.url).netloc.rpartition("@")[2]


def without_credentials(url: str) -> str:
    """The URL of a replica as operators may see it."""
    parts = urlsplit(url)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()


def parse_replicas(text: str) -> tuple[ReplicaSettings, ...]:
    """`URL,URL,…`; `KIND=URL` names another kind of server."""
    found = []
    for part in filter(None, (part.strip() for part in text.split(","))):
        kind, separator, url = part.partition("=")
        is_kind = bool(separator) and "/" not in kind
        found.append(checked({"url": url, "kind": kind} if is_kind else {"url": part}, "--replicas"))
    return tuple(found)


def checked(tree: Any, where: str) -> ReplicaSettings:
    try:
        settings = msgspec.convert(tree, ReplicaSettings)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{where}: {error}", param="replicas") from error
    if not _names_a_host(settings.url):
        shown = settings.url.rpartition("@")[2]  # Without a password.
        raise ConfigError(f"{where} has {shown!r}; a replica is http://HOST:PORT.", param="replicas")
    if settings.weight <= 0:
        raise ConfigError(f"{where} has weight {settings.weight:g}; it must be above 0.", param="replicas")
    return msgspec.structs.replace(settings, url=settings.url.rstrip("/"))


def _names_a_host(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # Its port or its address is none.
        return False


def read_fleet(path: Path) -> tuple[dict[str, Any], tuple[ReplicaSettings, ...]]:
    """The table `gateway` and the replicas with a URL. The other tables belong to `millrace up`."""
    try:
        tree = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"Cannot read {path}: {error.strerror}.", param="config") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid TOML: {error}", param="config") from error
    replicas = tree.get("replicas", [])
    if not isinstance(replicas, list):
        raise ConfigError(f"{path}: 'replicas' must be a list of tables, [[replicas]].", param="config")
    gateway = dict(tree.get("gateway", {}))
    if "router" in tree:
        gateway["router"] = tree["router"]
    return gateway, tuple(checked(one, str(path)) for one in replicas)


def gateway_settings(from_file: dict[str, Any], options: dict[str, Any]) -> GatewaySettings:
    """Options win over the file."""
    try:
        return msgspec.convert({**from_file, **options}, GatewaySettings)
    except msgspec.ValidationError as error:
        raise ConfigError(f"The gateway's settings are wrong: {error}", param="gateway") from error
