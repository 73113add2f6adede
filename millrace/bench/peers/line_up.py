"""Who takes part in a comparison, and in which of its workloads: a pure choice from what was given and found."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from millrace.bench.http.workloads import Workload
from millrace.bench.local_server import LocalServer, ServerProcess, free_port
from millrace.bench.peers.bars import Bar, wanted_workloads
from millrace.bench.peers.contestant import Between, Contestant
from millrace.bench.peers.installed import Launch, PeerModels, find_installed
from millrace.bench.peers.spec import KINDS, MILLRACE, PeerSpec, kind_of
from millrace.errors import ConfigError

PEERS = KINDS[1:]
_START_WITHIN_S = 600.0


@dataclass(frozen=True, slots=True)
class LineUp:
    """What the user asked for."""

    bars: tuple[Bar, ...]
    workloads: tuple[Workload, ...]
    given: Sequence[PeerSpec] = ()
    only: Sequence[str] = ()
    everything: bool = False
    """All engines through all workloads, not only where a bar asks."""
    between: Between = "pause"
    pythons: Sequence[str] = ()
    models: PeerModels = field(default_factory=PeerModels)
    threads: int = 0
    extra: Mapping[str, Sequence[str]] = field(default_factory=dict)

    def check(self) -> None:
        names = [spec.name for spec in self.given]
        if len(set(names)) < len(names) or MILLRACE in names:
            raise ConfigError(f"--peer names {', '.join(names)}: give each name once, and Millrace itself by --url.")
        known = tuple(dict.fromkeys([*names, *PEERS]))
        for name in self.only:
            if name not in known:
                raise ConfigError(f"--only has '{name}'; there are: {', '.join(known)}.")

    def workloads_of(self, name: str) -> tuple[str, ...]:
        """Those in which a bar asks for this engine, or, where none does, those in which any bar asks for anyone."""
        if self.everything or not self.bars:
            return tuple(work.name for work in self.workloads)
        return wanted_workloads(self.bars, kind_of(name)) or wanted_workloads(self.bars, MILLRACE)

    def is_wanted(self, kind: str) -> bool:
        """Whether a peer that is merely installed takes part."""
        if kind in {kind_of(spec.name) for spec in self.given}:
            return False
        if self.only:
            return kind in self.only
        return self.everything or not self.bars or bool(wanted_workloads(self.bars, kind))

    def one_at_a_time(self, kind: str) -> bool:
        """Whether this peer will never be sent two requests at once."""
        names = self.workloads_of(kind)
        return all(work.at_once == 1 for work in self.workloads if work.name in names)


def millrace_by_url(line_up: LineUp, url: str, pid: int, api_key: str) -> Contestant:
    return Contestant(MILLRACE, url=url, pid=pid, api_key=api_key, workloads=line_up.workloads_of(MILLRACE))


def millrace_started(line_up: LineUp, options: Sequence[str]) -> Contestant:
    return Contestant(
        MILLRACE,
        make=lambda: LocalServer(options),
        workloads=line_up.workloads_of(MILLRACE),
        between=line_up.between,
    )


def peers(line_up: LineUp, note: Callable[[str], None]) -> list[Contestant]:
    """Those given by their address, then those found installed; `note` hears of each that is left out."""
    line_up.check()
    chosen = [
        Contestant(spec.name, url=spec.url, pid=spec.pid, workloads=line_up.workloads_of(spec.name))
        for spec in line_up.given
        if not line_up.only or spec.name in line_up.only
    ]
    wanted = [kind for kind in PEERS if line_up.is_wanted(kind)]
    if not wanted:
        return chosen
    found = find_installed(
        line_up.pythons,
        line_up.models,
        kinds=wanted,
        threads=line_up.threads,
        one_at_a_time=[kind for kind in wanted if line_up.one_at_a_time(kind)],
        extra=line_up.extra,
    )
    for sentence in found.missing:
        note(sentence)
    for launch in found.launches:
        workloads = line_up.workloads_of(launch.name)
        chosen.append(Contestant(launch.name, make=_maker(launch), workloads=workloads, between=line_up.between))
    return chosen


def _maker(launch: Launch) -> Callable[[], ServerProcess]:
    def make() -> ServerProcess:
        port = free_port()
        command = launch.with_port(port)
        return ServerProcess(command, port, ready_path=launch.ready_path, start_timeout_s=_START_WITHIN_S)

    return make
