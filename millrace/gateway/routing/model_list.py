"""What a replica's /v1/models says: its models, and all names of each."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import msgspec

from millrace.serve.tenancy.keyring import Tenant

Entry = dict[str, Any]
LATEST = ":latest"
"""What Ollama's clients and servers add to a name without a tag."""


class ModelList:
    """Names of one model have the same `root` and no `parent`. Its adapters, and what was made of it, have it as
    `parent`."""

    def __init__(self, entries: Sequence[Entry] = ()) -> None:
        self.entries = entries
        self._by_id = {str(one["id"]): one for one in entries}

    @classmethod
    def parse(cls, body: bytes) -> ModelList:
        return cls([one for one in msgspec.json.decode(body).get("data", []) if isinstance(one, dict) and "id" in one])

    @property
    def has_adapters(self) -> bool:
        return any(one.get("parent") for one in self.entries)

    @property
    def ids(self) -> Collection[str]:
        return self._by_id.keys()

    def find(self, asked: str) -> Entry | None:
        """Of a model or adapter by any of its names; without one, of the first model."""
        if not asked:
            return self.entries[0] if self.entries else None
        plain = asked.removesuffix(LATEST)
        return self._by_id.get(plain) or self._by_id.get(plain + LATEST) or self._adapter(plain)

    def is_loaded(self, asked: str) -> bool:
        """True also for what is not known."""
        found = self.find(asked)
        return found is None or found.get("status", "loaded") == "loaded"

    def names_of(self, asked: str) -> tuple[str, ...]:
        """Empty if it is not known."""
        found = self.find(asked)
        if found is None:
            return ()
        name, root, parent = str(found["id"]), str(found.get("root") or found["id"]), found.get("parent")
        if not parent:
            return (name, name.removesuffix(LATEST), root, *self._aliases(root))
        if name != root:  # Made of a model, or of its adapter.
            return (name, root, *(self.names_of(root) if root in self._by_id else ()))
        adapter = name.removeprefix(f"{parent}:")
        alone = () if adapter in self._by_id else (adapter,)
        return (name, *(f"{alias}:{adapter}" for alias in self._aliases(str(parent))), *alone)

    def _aliases(self, root: str) -> list[str]:
        return [str(one["id"]) for one in self.entries if one.get("root") == root and not one.get("parent")]

    def _adapter(self, asked: str) -> Entry | None:
        """It is listed behind its model's own name; it may be asked for behind an alias, or alone."""
        base, colon, adapter = asked.partition(":")
        while colon:
            model = self._by_id.get(base)
            if model is not None and (found := self._by_id.get(f"{model.get('root')}:{adapter}")) is not None:
                return found
            more, colon, adapter = adapter.partition(":")
            base = f"{base}:{more}"
        adapters = (one for one in self.entries if one.get("parent") and one["id"] == f"{one['parent']}:{asked}")
        return next(adapters, None)


def may_use(tenant: Tenant, lists: Sequence[ModelList], asked: str) -> bool:
    """Whether the tenant may use what any of the replicas would answer with. What none of them knows is compared as it
    was sent."""
    if tenant.models is None:
        return True
    known = [names for one in lists if (names := one.names_of(asked))]
    return all(map(tenant.may_use, known or [(asked,)]))
