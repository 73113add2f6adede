"""Selects the engines of a comparison and the workloads of each."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from millrace.bench.http.workloads import Workload
from millrace.bench.local_server import LocalServer, ServerProcess, free_port
from millrace.bench.peers.bars import Bar, wanted_workloads
from millrace.bench.peers.compared_engine import ComparedEngine, IdleMode
from millrace.bench.peers.installed import PeerModels, StartCommand, find_installed
from millrace.bench.peers.spec import KINDS, MILLRACE, PeerSpec, kind_of
from millrace.errors import ConfigError

PEERS = KINDS[1:]
_START_TIMEOUT_S = 600.0


@dataclass(frozen=True, slots=True)
class EngineSelection:
    """The user's choices."""

    bars: tuple[Bar, ...]
    workloads: tuple[Workload, ...]
    given: Sequence[PeerSpec] = ()
    only: Sequence[str] = ()
    everything: bool = False
    """Run all engines through all workloads, not only those that a bar needs."""
    between: IdleMode = "pause"
    pythons: Sequence[str] = ()
    models: PeerModels = field(default_factory=PeerModels)
    threads: int = 0
    extra: Mapping[str, Sequence[str]] = field(default_factory=dict)

    def check(self) -> None:
        names = [spec.name for spec in self.given]
        if len(set(names)) < len(names) or MILLRACE in names:
            raise ConfigError(f"--peer has {', '.join(names)}: each name must be unique; use --url for Millrace.")
        known = tuple(dict.fromkeys([*names, *PEERS]))
        for name in self.only:
            if name not in known:
                raise ConfigError(f"--only has unknown peer '{name}'. Peers: {', '.join(known)}.")

    def workloads_of(self, name: str) -> tuple[str, ...]:
        """The workloads whose bars need this engine; if none do, all workloads with a bar."""
        if self.everything or not self.bars:
            return tuple(workload.name for workload in self.workloads)
        return wanted_workloads(self.bars, kind_of(name)) or wanted_workloads(self.bars, MILLRACE)

    def is_wanted(self, kind: str) -> bool:
        """True if an installed peer of this kind takes part."""
        if kind in {kind_of(spec.name) for spec in self.given}:
            return False
        if self.only:
            return kind in self.only
        return self.everything or not self.bars or bool(wanted_workloads(self.bars, kind))

    def one_at_a_time(self, kind: str) -> bool:
        """True if this peer never gets two requests at once."""
        names = self.workloads_of(kind)
        return all(workload.concurrency == 1 for workload in self.workloads if workload.name in names)


def millrace_by_url(selection: EngineSelection, url: str, pid: int, api_key: str) -> ComparedEngine:
    return ComparedEngine(MILLRACE, url=url, pid=pid, api_key=api_key, workloads=selection.workloads_of(MILLRACE))


def millrace_started(selection: EngineSelection, options: Sequence[str]) -> ComparedEngine:
    return ComparedEngine(
        MILLRACE,
        make=lambda: LocalServer(options),
        workloads=selection.workloads_of(MILLRACE),
        between=selection.between,
    )


def peers(selection: EngineSelection, note: Callable[[str], None]) -> list[ComparedEngine]:
    """Peers given by URL, then installed ones; `note` gets a sentence for each that is skipped."""
    selection.check()
    chosen = [
        ComparedEngine(spec.name, url=spec.url, pid=spec.pid, workloads=selection.workloads_of(spec.name))
        for spec in selection.given
        if not selection.only or spec.name in selection.only
    ]
    wanted = [kind for kind in PEERS if selection.is_wanted(kind)]
    if not wanted:
        return chosen
    found = find_installed(
        selection.pythons,
        selection.models,
        kinds=wanted,
        threads=selection.threads,
        one_at_a_time=[kind for kind in wanted if selection.one_at_a_time(kind)],
        extra=selection.extra,
    )
    for sentence in found.missing:
        note(sentence)
    for start_command in found.commands:
        workloads = selection.workloads_of(start_command.name)
        chosen.append(
            ComparedEngine(
                start_command.name, make=_maker(start_command), workloads=workloads, between=selection.between
            )
        )
    return chosen


def _maker(start_command: StartCommand) -> Callable[[], ServerProcess]:
    def make() -> ServerProcess:
        port = free_port()
        command = start_command.with_port(port)
        return ServerProcess(command, port, ready_path=start_command.ready_path, start_timeout_s=_START_TIMEOUT_S)

    return make
