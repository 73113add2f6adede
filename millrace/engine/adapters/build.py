"""Makes an engine's adapters from its settings."""

from __future__ import annotations

from pathlib import Path

import torch

from millrace.config import AdapterConfig, Config
from millrace.engine.adapters.canaries import Canaries
from millrace.engine.adapters.canary_journal import CanaryJournal
from millrace.engine.adapters.reader import AdapterReader
from millrace.engine.adapters.requests import AdaptedRequests
from millrace.engine.adapters.service import EngineAdapters
from millrace.engine.adapters.slots import Fill
from millrace.engine.adapters.store import AdapterStore, parse_adapters
from millrace.engine.figures.shares import Shares
from millrace.errors import AdapterError, ConfigError, ModelError
from millrace.models.adapters.config import read_config
from millrace.models.adapters.files import Limits
from millrace.models.adapters.targets import targets_of
from millrace.models.spec.model_spec import ModelSpec
from millrace.sources.adapters.find import adapter_folder
from millrace.sources.download import Progress


def check_adapters(
    config: Config, *, is_encoder: bool = False, spec: ModelSpec | None = None, progress: Progress | None = None
) -> None:
    """Raise ConfigError for settings that cannot go with adapters, before anything is loaded. Adapters of the hub are
    downloaded."""
    if not config.adapters.num_slots:
        return
    conflicts = (
        (is_encoder, "the model is an encoder, whose adapters are not supported", "leave --adapters out"),
        *(
            (is_there, f"the model has {layers}, whose adapters are not supported", "leave --adapters out")
            for is_there, layers in (
                (spec is not None and spec.recurrent is not None, "recurrent layers"),
                (spec is not None and spec.latent is not None, "latent attention"),
            )
        ),
    )
    for is_there, why, remedy in conflicts:
        if is_there:
            raise ConfigError(f"Adapters are switched on, but {why}: {remedy}.", param="adapters")
    folder = config.adapters.adapter_dir
    if folder and not Path(folder).expanduser().is_dir():
        raise ConfigError(f"--adapter-dir {folder}: there is no such directory.", param="adapter_dir")
    _find(config.adapters, progress, offline=config.model.offline)


def _find(config: AdapterConfig, progress: Progress | None = None, *, offline: bool) -> dict[str, Path]:
    """Directories by name. Raises ConfigError with the name of an adapter whose files are not there."""
    found = {}
    for name, source in parse_adapters(config.adapters).items():
        try:
            found[name] = adapter_folder(source, max_bytes=config.max_bytes, progress=progress, offline=offline)
            read_config(found[name])
        except (AdapterError, ModelError) as error:
            raise ConfigError(f"The adapter {name!r} cannot be served: {error.message}", param="adapters") from error
    return found


def make_adapters(
    config: AdapterConfig, spec: ModelSpec, dtype: torch.dtype, fill: Fill, shares: Shares, device_bytes: int
) -> EngineAdapters | None:
    """None: the model takes no adapters. `device_bytes`: of the device's own memory, for all slots; 0 if it has
    none."""
    if not config.num_slots:
        return None
    found = _find(config, offline=True)
    limits = Limits(config.max_lora_rank, config.max_bytes, keeps_bfloat16=not device_bytes)
    reader = AdapterReader(targets_of(spec), dtype, limits, is_pinned=device_bytes > 0)
    store = AdapterStore(reader, config.max_bytes)
    for name, path in found.items():
        store.declare(name, path)
    requests = AdaptedRequests(store, config.num_slots, fill, max_bytes=device_bytes or None)
    folder = Path(config.adapter_dir).expanduser() if config.adapter_dir else None
    kept = Path(config.canary_file).expanduser() if config.canary_file else None
    return EngineAdapters(
        requests,
        lambda: shares,
        folder,
        allows_adding=config.allow_adapters,
        canaries=Canaries(None if kept is None else CanaryJournal(kept)),
        on_end=reader.close,
    )
