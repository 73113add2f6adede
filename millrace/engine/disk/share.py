"""The share of another rank of a split model: it stores its part of every block that rank 0 stores."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from millrace.config import Config
from millrace.engine.copies import PendingCopy
from millrace.engine.disk.copier import DiskThreads
from millrace.engine.disk.open import open_disk
from millrace.engine.disk.others import DiskReply, digests_of
from millrace.run.device.host_blocks import HostBlocks
from millrace.run.ranks.recorder import DiskWork

Reply = Callable[[bytes], None]


class DiskShare:
    """Tells at once what it has."""

    def __init__(
        self, config: Config, rank: int, identity: str, num_slots: int, host: Sequence[HostBlocks], reply: Reply
    ) -> None:
        """`identity` and `num_slots` are those of rank 0. `reply`: may be called by several threads at once. Raises
        ConfigError."""
        self._reply = reply
        store = open_disk(config, identity, sum(len(each.bytes_of(0)) for each in host), rank=rank, num_slots=num_slots)
        stored = None if store is None else digests_of(store.stored())
        self._threads = None if store is None else DiskThreads(store, host)
        self._tell(DiskReply(0, stored=stored))

    def take(self, work: DiskWork, before: Sequence[PendingCopy]) -> None:
        """`before`: copies between the device and host memory that rank 0 had asked for before."""

        def on_end(seconds: float, error: Exception | None) -> None:
            self._tell(DiskReply(work.number, seconds, "" if error is None else str(error) or repr(error)))

        if self._threads is None:
            raise RuntimeError("rank 0 uses a disk that this rank cannot use")
        self._threads.start(work, before, on_end)

    def _tell(self, reply: DiskReply) -> None:
        self._reply(msgspec.msgpack.encode(reply))

    def close(self) -> None:
        if self._threads is not None:
            self._threads.close()
