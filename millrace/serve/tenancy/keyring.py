"""API keys and their tenants, from a TOML file that is reloaded when it changes.

[tenants.acme]
keys = ["sha256:…"]            # hashes only; `millrace keys add` creates a key and adds its hash
weight = 2.0                   # share of the engine relative to other tenants; default 1
tokens_per_minute = 100000     # prompt and output tokens; default 0: no limit
max_concurrent = 64            # requests at once; default 0: no limit
most_urgent = "standard"       # most urgent priority class it may ask for; default "interactive"
private_cache = false          # true or false overrides the server's share_prefixes for this tenant
cache_mib = 512                # KV memory that its handles may keep cached; default 0: what the server allows
models = ["smollm2:pirate"]    # models and adapters that it may use, by any name; * for any text; default: all
operator = true                # sees and cancels all tenants' requests, manages models; default false

[models."smollm2:pirate"]      # of all tenants together; any name of the model or adapter
tokens_per_minute = 50000
max_concurrent = 8
weight = 2.0                   # with --share-by adapter: its share relative to other adapters; default 1
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import time
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal

import msgspec

from millrace.config import ShareBy
from millrace.errors import ConfigError, Forbidden, Unauthorized

log = logging.getLogger("millrace.serve")

MAX_WEIGHT = 1000
DIGEST_PREFIX = "sha256:"
_INDEX_BYTES = 4
_DUMMY_DIGEST = b"\0" * 32
"""Compared with a key whose prefix is unknown, so that such a key takes as long to refuse."""
RELOAD_CHECK_S = 1.0


class Tenant(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    keys: tuple[str, ...] = ()
    weight: float = 1.0
    tokens_per_minute: int = 0
    max_concurrent: int = 0
    most_urgent: Literal["interactive", "standard", "batch"] = "interactive"
    private_cache: bool | None = None
    """False shares cached prefixes with the other tenants that do; None = as the server's `share_prefixes` says."""
    cache_mib: int = 0
    models: tuple[str, ...] | None = None
    """Models and adapters that it may use, each by any of its names, with `*` for any text; None: all."""
    operator: bool = False
    name: str = ""

    @property
    def title(self) -> str:
        return f"Tenant {self.name!r}"

    @property
    def quota_name(self) -> str:
        return self.name

    def may_use(self, names: Iterable[str]) -> bool:
        """`names`: all of one model or adapter."""
        return self.models is None or any(fnmatchcase(name, allowed) for name in names for allowed in self.models)


def check_may_use(tenant: Tenant, names: Iterable[str], asked: str) -> None:
    """`names`: all of what was asked for by the name `asked`."""
    if not tenant.may_use(names):
        raise wrong_model(tenant, asked)


def wrong_model(tenant: Tenant, asked: str) -> Forbidden:
    allowed = ", ".join(map(repr, tenant.models or ())) or "none"
    return Forbidden(
        f"The keys of tenant {tenant.name!r} may not use the model {asked[:200]!r}; they may use {allowed}.",
        param="model",
    )


class ModelLimits(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Limits of one model or adapter, for all tenants together."""

    tokens_per_minute: int = 0
    max_concurrent: int = 0
    weight: float | None = None
    """Of its fair share, with `--share-by adapter`; None = 1, or that under another of its names."""
    name: str = ""

    @property
    def title(self) -> str:
        return f"The model {self.name!r}"

    @property
    def quota_name(self) -> str:
        """No tenant's: theirs have no zero bytes."""
        return f"model\0{self.name}"


DEFAULT_TENANT = Tenant()
"""Tenant of every request on a server that requires no keys."""


class KeysFile(msgspec.Struct, forbid_unknown_fields=True):
    tenants: dict[str, Tenant] = {}
    models: dict[str, ModelLimits] = {}


def digest_of(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def read_tenants(path: Path) -> dict[str, Tenant]:
    """The file's tenants by name. Raises `ConfigError` with the location of the first mistake."""
    return read_keys(path).tenants


def read_keys(path: Path) -> KeysFile:
    try:
        tree: Any = tomllib.loads(path.read_text(encoding="utf-8"))
        found = msgspec.convert(tree, KeysFile)
    except OSError as error:
        raise ConfigError(f"Cannot read the keys file {path}: {error.strerror}.", param="server.keys_file") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, msgspec.ValidationError) as error:
        raise ConfigError(f"The keys file {path} is invalid: {error}", param="server.keys_file") from error
    for name, tenant in found.tenants.items():
        _check(path, name, tenant)
    for name, limits in found.models.items():
        if min(limits.tokens_per_minute, limits.max_concurrent) < 0:
            what = f"the model {name!r} has a limit below 0; it must be 0 (no limit) or more."
            raise ConfigError(f"The keys file {path} is invalid: {what}", param="server.keys_file")
        if limits.weight is not None and not 0 < limits.weight <= MAX_WEIGHT:
            what = f"the model {name!r} has weight {limits.weight}; it must be above 0 and at most {MAX_WEIGHT}."
            raise ConfigError(f"The keys file {path} is invalid: {what}", param="server.keys_file")
    return KeysFile(
        {name: msgspec.structs.replace(tenant, name=name) for name, tenant in found.tenants.items()},
        {name: msgspec.structs.replace(limits, name=name) for name, limits in found.models.items()},
    )


def _check(path: Path, name: str, tenant: Tenant) -> None:
    def invalid(what: str) -> ConfigError:
        return ConfigError(f"The keys file {path} is invalid: tenant {name!r} {what}", param="server.keys_file")

    if not name or "\0" in name:
        raise invalid("needs a name without zero bytes.")
    if not 0 < tenant.weight <= MAX_WEIGHT:
        raise invalid(f"has weight {tenant.weight}; it must be above 0 and at most {MAX_WEIGHT}.")
    for field in ("tokens_per_minute", "max_concurrent", "cache_mib"):
        if getattr(tenant, field) < 0:
            raise invalid(f"has {field} {getattr(tenant, field)}; it must be 0 (no limit) or more.")
    for key in tenant.keys:
        if not key.startswith(DIGEST_PREFIX) or len(key) != len(DIGEST_PREFIX) + 64 or not _is_hex(key[7:]):
            raise invalid("has a key that is not 'sha256:' and 64 hex digits; create one with `millrace keys add`.")


def _is_hex(text: str) -> bool:
    return all(letter in "0123456789abcdef" for letter in text)


@dataclass(slots=True)
class _Index:
    """Digests by their first bytes: a look-up compares only a few, each in constant time."""

    by_prefix: dict[bytes, list[tuple[bytes, Tenant]]]

    @classmethod
    def of(cls, tenants: dict[str, Tenant]) -> _Index:
        by_prefix: dict[bytes, list[tuple[bytes, Tenant]]] = {}
        for tenant in tenants.values():
            for key in tenant.keys:
                digest = bytes.fromhex(key.removeprefix(DIGEST_PREFIX))
                by_prefix.setdefault(digest[:_INDEX_BYTES], []).append((digest, tenant))
        return cls(by_prefix)


class Keyring:
    """Maps keys to tenants. A changed file takes effect within a second; if it is invalid, the error is logged and the
    previous keys stay valid."""

    def __init__(self, path: Path, share_by: ShareBy | None = None) -> None:
        """`share_by`: whose weights count, and of which others a warning tells; None: tenants', without a word."""
        self._path = path
        self._share_by = share_by
        self._seen = self._stamp()
        self._checked_at = time.monotonic()
        self._take(read_keys(path))

    def _take(self, found: KeysFile) -> None:
        self._tenants, self._models = found.tenants, found.models
        self._index = _Index.of(self._tenants)
        if self._share_by == "tenant" and any(one.weight is not None for one in self._models.values()):
            log.warning("%s has weights of models, which count with --share-by adapter only.", self._path)
        if self._share_by == "adapter" and any(one.weight != 1 for one in self._tenants.values()):
            log.warning("%s has weights of tenants, which do not count with --share-by adapter.", self._path)

    def weight_of(self, tenant: Tenant, names: Iterable[str]) -> float:
        """Of the fair share that a request takes. `names`: all of its model or adapter."""
        if self._share_by != "adapter":
            return tenant.weight
        return next((one.weight for one in self.limits_of(names) if one.weight is not None), 1.0)

    def limits_of(self, names: Iterable[str]) -> list[ModelLimits]:
        """`names`: all of one model or adapter. Limits under each of them hold."""
        self._reload_if_changed()
        return [self._models[name] for name in names if name in self._models]

    def tenant_of(self, key: str | None) -> Tenant:
        self._reload_if_changed()
        if not key:
            raise Unauthorized(
                "This server requires an API key; send it as 'Authorization: Bearer <key>' or as 'x-api-key: <key>'.",
                code="missing_api_key",
            )
        digest = digest_of(key)
        found: Tenant | None = None
        for known, tenant in self._index.by_prefix.get(digest[:_INDEX_BYTES], [(_DUMMY_DIGEST, DEFAULT_TENANT)]):
            if hmac.compare_digest(known, digest):
                found = tenant
        if found is None:
            raise Unauthorized("Unknown API key. Check it, or ask the server's operator for one.")
        return found

    def named(self, name: str) -> Tenant:
        """The tenant of stored work, which carries no key; one without limits if the tenant was removed."""
        self._reload_if_changed()
        return self._tenants.get(name) or Tenant(name=name)

    def _stamp(self) -> tuple[int, int, int]:
        try:
            status = os.stat(self._path)
        except OSError:
            return (0, 0, 0)
        return status.st_mtime_ns, status.st_size, status.st_ino

    def _reload_if_changed(self) -> None:
        now = time.monotonic()
        if now - self._checked_at < RELOAD_CHECK_S:
            return
        self._checked_at = now
        stamp = self._stamp()
        if stamp == self._seen:
            return
        self._seen = stamp
        try:
            self._take(read_keys(self._path))
            log.info("Reloaded the keys file %s.", self._path)
        except ConfigError as error:
            log.error("%s The previous keys stay valid.", error.message)
