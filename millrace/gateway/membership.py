"""Replicas that come and go: by the fleet's file, by DNS, and by registration for a time."""

from __future__ import annotations

import asyncio
import logging
import socket
from pathlib import Path

from millrace.errors import ConfigError
from millrace.gateway.settings import ReplicaSettings, read_fleet, replica_name
from millrace.gateway.state import GatewayState

log = logging.getLogger("millrace.gateway")
FILE, DNS = "file", "dns"
"""Who added a replica; each removes only its own."""


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
        use_replicas(state, replicas, FILE)


async def follow_dns(state: GatewayState, name: str) -> None:
    """Every address of HOST:PORT is a replica. While the name cannot be resolved, they stay as they are."""
    host, port = host_and_port(name)
    loop, has_failed = asyncio.get_running_loop(), False
    while True:
        try:
            found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except OSError as error:
            if not has_failed:
                log.warning("%s cannot be resolved: %s. The replicas stay as they are.", host, error)
            has_failed = True
        else:
            has_failed = False
            wanted = sorted({_url(str(address[0]), port) for *_, address in found})
            use_replicas(state, tuple(map(ReplicaSettings, wanted)), DNS)
        await asyncio.sleep(state.settings.discover_s)


async def expire_leases(state: GatewayState) -> None:
    """Remove registered replicas that did not register again in time."""
    while True:
        await asyncio.sleep(state.settings.probe_s)
        now = state.fleet.clock()
        for name, replica in list(state.fleet.replicas.items()):
            if replica.lease_until and now > replica.lease_until:
                log.warning("Replica %s did not register again; it is removed.", name)
                remove_replica(state, name, "its registration ended")


def use_replicas(state: GatewayState, wanted: tuple[ReplicaSettings, ...], source: str) -> None:
    """Add the new ones of a source and remove its others. A replica whose settings changed is both."""
    fleet, by_name = state.fleet, {replica_name(one): one for one in wanted}
    for name, replica in list(fleet.replicas.items()):
        if replica.source == source and by_name.get(name) != replica.settings:
            remove_replica(state, name, "it was removed from the fleet")
    for name, settings in by_name.items():
        if name not in fleet.replicas:
            state.watch.follow(fleet.add(settings, source))


def remove_replica(state: GatewayState, name: str, reason: str) -> None:
    """Its open streams go on elsewhere."""
    replica = state.fleet.replicas[name]
    state.watch.unfollow(replica)
    state.fleet.remove(name)
    replica.give_up_all(reason)


def host_and_port(name: str) -> tuple[str, int]:
    host, _, port = name.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise ConfigError(f"--discover is {name!r}; it must be HOST:PORT.", param="discover")
    return host.strip("[]"), int(port)


def _url(address: str, port: int) -> str:
    return f"http://[{address}]:{port}" if ":" in address else f"http://{address}:{port}"


def _stamp(path: Path) -> tuple[int, int]:
    try:
        status = path.stat()
    except OSError:
        return (0, 0)
    return status.st_mtime_ns, status.st_size
