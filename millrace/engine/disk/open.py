"""Opens the folder of a model's KV blocks."""

from __future__ import annotations

import hashlib
from pathlib import Path

from millrace.config import Config
from millrace.engine.disk.forms import BlockForm, EncryptedForm
from millrace.engine.disk.owner_keys import OwnerKeys, read_disk_key
from millrace.engine.disk.store import PLAIN, BlockStore, entry_bytes, open_store
from millrace.plan.kv.disk_tier import DiskTierSettings
from millrace.plan.planner.block_names import name_bytes

GIB = 1 << 30
LAYOUT = "3"
"""Of the files. Another one has other folders."""
RANK_PATIENCE_S = 30.0
"""Rank 0 alone finds that another server uses the directory. The ranks of an engine that has just died end soon."""


def open_disk(
    config: Config, identity: str, block_bytes: int, *, rank: int = 0, num_slots: int | None = None
) -> BlockStore | None:
    """`identity`: all that a block's content depends on beside its name. `num_slots`: as many as rank 0 has; None on
    rank 0. None if no disk is wanted, or none can be used. Raises ConfigError."""
    if not config.memory.kv_disk:
        return None
    key = read_disk_key(config.memory.kv_disk_key) if config.memory.kv_disk_key else b""
    directory, own = Path(config.memory.kv_disk).expanduser(), hashlib.sha256(key).hexdigest()
    share = f"-rank{rank}" if rank else ""
    form: BlockForm = EncryptedForm(OwnerKeys(directory / f"keys-{own[:24]}{share}", key)) if key else PLAIN
    size = name_bytes(config.plan.block_size)
    slot_bytes = block_bytes + form.extra_bytes + entry_bytes(size + form.extra_name_bytes)
    if num_slots is None:
        num_slots = int(config.memory.kv_disk_gib * GIB) // slot_bytes
    parts = (identity, LAYOUT, block_bytes, config.plan.block_size, config.plan.drafter, config.run.deterministic)
    name = hashlib.sha256("\n".join(map(str, (*parts, own) if key else parts)).encode()).hexdigest()[:24]
    return open_store(
        directory / f"{name}{share}",
        num_slots=num_slots,
        block_bytes=block_bytes,
        name_bytes=size,
        form=form,
        patience_s=RANK_PATIENCE_S if rank else 0.0,
    )


def disk_settings(store: BlockStore | None) -> DiskTierSettings:
    return DiskTierSettings(0 if store is None else store.num_slots)
