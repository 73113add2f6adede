"""Compares the catalogue with the hub: names, sizes, licences. The last result is kept, with its date."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from millrace.config import cache_dir
from millrace.errors import ModelError
from millrace.sources.catalogue.entries import CatalogueEntry
from millrace.sources.hub import describe, hub_address, model_info, why_unreachable
from millrace.sources.names import DEFAULT_QUANTISATION, HubName

if TYPE_CHECKING:
    from huggingface_hub.hf_api import ModelInfo

PARAMETER_TOLERANCE = 0.03
SIZE_TOLERANCE = 0.15
"""Sizes of quantised files are estimated from the parameters: some tensors stay at a higher precision."""


@dataclass(frozen=True, slots=True)
class EntryCheck:
    """What the hub says of one entry. No problems: the entry is right."""

    problems: tuple[str, ...] = ()
    licence: str = ""
    parameters: int = 0
    """0: the hub does not say."""
    gguf_bytes: int = 0
    """Of the quantisation that machines without a GPU download."""


@dataclass(frozen=True, slots=True)
class CatalogueCheck:
    date: str
    """YYYY-MM-DD, in UTC."""
    hub: str
    models: dict[str, EntryCheck] = field(default_factory=dict)


def check_entries(
    chosen: Sequence[CatalogueEntry], on_entry: Callable[[str, int, int], None] = lambda name, done, total: None
) -> CatalogueCheck:
    """Ask the hub about these entries and remember what it says, beside earlier answers about others. Raises if the hub
    cannot be reached."""
    hub = hub_address()
    reason = why_unreachable()
    if reason:
        raise ModelError(f"The hub at {hub} cannot be reached: {reason}. Nothing was compared.")
    found: dict[str, EntryCheck] = {}
    for done, entry in enumerate(chosen):
        on_entry(entry.name, done, len(chosen))
        found[entry.name] = _check(entry)
    before = last_check()
    kept = before.models if before is not None and before.hub == hub else {}
    check = CatalogueCheck(datetime.now(UTC).strftime("%Y-%m-%d"), hub, {**kept, **found})
    path = _path()
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.write_text(json.dumps(asdict(check)), encoding="utf-8")
    os.replace(partial, path)
    return check


def last_check() -> CatalogueCheck | None:
    """None: the catalogue was never compared with the hub on this machine."""
    try:
        record = json.loads(_path().read_text(encoding="utf-8"))
        models = {
            name: EntryCheck(**{**found, "problems": tuple(found["problems"])})
            for name, found in record["models"].items()
        }
        return CatalogueCheck(str(record["date"]), str(record["hub"]), models)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _check(entry: CatalogueEntry) -> EntryCheck:
    problems: list[str] = []
    licence, parameters, gguf_bytes = "", 0, 0
    try:
        info = model_info(HubName(entry.hub))
        licence, parameters = _licence(info), int(info.safetensors.total) if info.safetensors else 0
        problems += _differences(entry, info, parameters)
    except ModelError as error:
        problems.append(_missing(entry.hub, error, is_gated=entry.gated))
    try:
        gguf_bytes = describe(HubName(entry.gguf, "main", DEFAULT_QUANTISATION), of_any_family=True).num_bytes
        expected = entry.num_bytes(DEFAULT_QUANTISATION.lower())
        if abs(gguf_bytes / expected - 1) > SIZE_TOLERANCE:
            problems.append(
                f"{entry.gguf} has {gguf_bytes / 1e9:.1f} GB in {DEFAULT_QUANTISATION}, not {expected / 1e9:.1f} GB"
            )
    except ModelError as error:
        problems.append(_missing(entry.gguf, error, is_gated=False))
    return EntryCheck(tuple(filter(None, problems)), licence, parameters, gguf_bytes)


def _differences(entry: CatalogueEntry, info: ModelInfo, parameters: int) -> Iterator[str]:
    if parameters and abs(parameters / (entry.parameters * 1e9) - 1) > PARAMETER_TOLERANCE:
        yield f"{entry.hub} has {parameters / 1e9:.3g} billion parameters, not {entry.parameters:g}"
    if bool(info.gated) != entry.gated:
        yield f"{entry.hub} is {'gated' if info.gated else 'not gated'}"


def _missing(repo: str, error: ModelError, *, is_gated: bool) -> str:
    """What is wrong with a repository that cannot be described; raises if it is the hub that cannot be reached."""
    if error.code == "gated":
        return "" if is_gated else f"{repo} is gated"
    if error.code == "unreachable":
        raise error
    return error.message


def _licence(info: ModelInfo) -> str:
    card: Any = info.card_data
    if card is not None and isinstance(card.get("license"), str):
        return str(card.get("license_name") or card["license"])
    return next((tag.removeprefix("license:") for tag in info.tags or () if tag.startswith("license:")), "")


def _path() -> Path:
    return cache_dir() / "catalogue_check.json"
