"""Opens the folder of a model's KV blocks."""

from __future__ import annotations

import hashlib
from pathlib import Path

from millrace.config import Config
from millrace.engine.disk.forms import BlockForm, EncryptedForm, read_disk_key
from millrace.engine.disk.store import PLAIN, BlockStore, entry_bytes, open_store
from millrace.plan.kv.disk_tier import DiskTierSettings, name_bytes

GIB = 1 << 30
LAYOUT = "1"
"""Of the files. Another one has other folders."""


def open_disk(config: Config, identity: str, block_bytes: int) -> BlockStore | None:
    """`identity`: all that a block's content depends on beside its name. None if no disk is wanted, or none can be
    used. Raises ConfigError."""
    if not config.memory.kv_disk:
        return None
    key = read_disk_key(config.memory.kv_disk_key) if config.memory.kv_disk_key else b""
    form: BlockForm = EncryptedForm(key) if key else PLAIN
    size, extra = name_bytes(config.plan.block_size), form.extra_bytes
    num_slots = int(config.memory.kv_disk_gib * GIB) // (block_bytes + extra + entry_bytes(size + extra))
    parts = (identity, LAYOUT, block_bytes, config.plan.block_size, config.plan.drafter, config.run.deterministic)
    own = (hashlib.sha256(key).hexdigest(),) if key else ()
    name = hashlib.sha256("\n".join(map(str, (*parts, *own))).encode()).hexdigest()[:24]
    folder = Path(config.memory.kv_disk).expanduser() / name
    return open_store(folder, num_slots=num_slots, block_bytes=block_bytes, name_bytes=size, form=form)


def disk_settings(store: BlockStore | None) -> DiskTierSettings:
    return DiskTierSettings(0 if store is None else store.num_slots)
