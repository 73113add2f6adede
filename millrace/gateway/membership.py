"""Replicas that come and go: the fleet's file is read again when it changes."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

from millrace.errors import ConfigError
from millrace.gateway.settings import ReplicaSettings, read_fleet, replica_name
from millrace.gateway.state import GatewayState

log = logging.getLogger("millrace.gateway")


async def follow_file(state: GatewayState, path: Path) -> None:
    seen = _stamp(path)
    while True:
        await asyncio.sleep(state.settings.probe_s)
        stamp = _stamp(path)
        if stamp == seen:
            continue
        seen = stamp
        try:
            _, replicas = read_fleet(path)
        except ConfigError as error:
            log.error("%s The replicas stay as they are.", error.message)
            continue
        use_replicas(state, replicas)


def use_replicas(state: GatewayState, wanted: tuple[ReplicaSettings, ...]) -> None:
    """Add the new ones and remove the others. A replica whose settings changed is both."""
    fleet, by_name = state.fleet, {replica_name(one): one for one in wanted}
    for name, replica in list(fleet.replicas.items()):
        if by_name.get(name) != replica.settings:
            state.watch.unfollow(replica)
            fleet.remove(name)
            replica.give_up_all("it was removed from the fleet")
    for name, settings in by_name.items():
        if name not in fleet.replicas:
            state.watch.follow(fleet.add(settings))


def _stamp(path: Path) -> tuple[int, int]:
    try:
        status = path.stat()
    except OSError:
        return (0, 0)
    return status.st_mtime_ns, status.st_size
