"""`millrace bench peers`: compares Millrace with other engines in alternating turns on the same workloads."""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
import time
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING

from millrace.terminal.parser import UsageError
from millrace.terminal.settings_options import load_settings
from millrace.terminal.settings_table import toml_lines
from millrace.terminal.status_line import StatusLine

if TYPE_CHECKING:
    from millrace.bench.figures import Figure
    from millrace.bench.http.workloads import Workload
    from millrace.bench.peers.bars import Bar
    from millrace.bench.peers.compared_engine import ComparedEngine, IdleMode
    from millrace.bench.peers.installed import PeerModels
    from millrace.bench.peers.rounds import RoundOptions
    from millrace.bench.peers.selection import EngineSelection
    from millrace.config import LoadedConfig

EXAMPLES = """\
bench peers:
  Measures Millrace and each peer in alternating turns (workloads single, shared-prefix and mixed) and compares the
  medians with the bars. Peers are given by URL or found installed; nothing is installed. See docs/peers.md.
  millrace bench peers --peer-python ~/peers/bin/python --bf16-model ./smollm2-bf16
  millrace bench peers --peer vllm=http://127.0.0.1:8001,pid=4242 --peer llama.cpp=http://127.0.0.1:8002
  millrace bench peers --peer-python … --rounds 3 --minutes 15 --json > peers.jsonl
  millrace bench peers --model qwen2.5-coder-1.5b --only llama.cpp --quick"""

_SINGLE, _MIXED, _SHARED = "single", "mixed", "shared-prefix"
_OWN_OPTIONS = (
    *("peer", "peer_python", "peer_args", "gguf", "bf16_model", "openvino_model"),
    *("only", "rounds", "minutes", "between", "bars", "everything"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("bench peers")
    add = group.add_argument
    add("--peer", action="append", default=[], metavar="NAME=URL[,pid=N]", help="running server; may be repeated")
    add(
        "--peer-python",
        action="append",
        default=[],
        metavar="PATH",
        help="interpreter with peers installed; may be repeated",
    )
    add("--peer-args", action="append", default=[], metavar="NAME=ARGS", help="extra arguments of a peer's command")
    add("--gguf", default="", metavar="FILE", help="model for llama.cpp (default: the model that Millrace serves)")
    add("--bf16-model", default="", metavar="DIR", help="model for vLLM, as safetensors")
    add("--openvino-model", default="", metavar="PATH", help="model for OpenVINO (default: the GGUF file)")
    add("--only", default="", metavar="NAMES", help="only these peers, separated by commas")
    add(
        "--rounds",
        type=int,
        metavar="N",
        help="turns per engine, or of bench observe, speculate and smooth (default: 2)",
    )
    add("--minutes", type=float, metavar="X", help="time budget; work that would not fit is skipped (default: 15)")
    add(
        "--between",
        default="",
        metavar="WHAT",
        help="between turns: pause (default), keep or stop engines started here",
    )
    add("--bars", default="", metavar="NAME", help="smollm2-135m, qwen2.5-coder-1.5b or none (default: by model)")
    add(
        "--everything",
        action="store_true",
        default=None,
        help="run all engines through all workloads, not only those that a bar needs",
    )


def reject_own_options(args: argparse.Namespace, allowed: Collection[str] = ()) -> None:
    for name in _OWN_OPTIONS:
        if name not in allowed and getattr(args, name) not in (None, "", []):
            flag = f"--{name.replace('_', '-')}"
            raise UsageError(f"{flag} is an option of `millrace bench peers`.")


def run(args: argparse.Namespace) -> int:
    import uvloop

    from millrace.bench.peers.selection import millrace_by_url, millrace_started, peers

    loaded = load_settings(args)
    bars, options = _bars(args.bars, loaded.config.model.source), _round_options(args)
    reporter = Reporter(bars, as_json=args.json)
    selection = _selection(args, loaded, bars, options)
    others = peers(selection, reporter.note)
    with tempfile.TemporaryDirectory() as folder:
        settings = Path(folder) / "settings.toml"
        settings.write_text("\n".join(toml_lines(loaded)), encoding="utf-8")
        if args.url:
            own = millrace_by_url(selection, args.url, args.pid, args.api_key)
        else:
            own = millrace_started(selection, ["--config", str(settings)])
        try:
            uvloop.run(_compare([own, *others], options, reporter))
        finally:
            reporter.finish()
    return 0 if reporter.is_complete else 1


async def _compare(engines: list[ComparedEngine], options: RoundOptions, reporter: Reporter) -> None:
    from millrace.bench.local_server import cancel_on_sigterm
    from millrace.bench.peers.rounds import Comparison, Listener

    cancel_on_sigterm()
    listener = Listener(reporter.figure, reporter.progress, reporter.problem)
    await Comparison(engines, options, listener).run()


def _bars(name: str, model: str) -> tuple[Bar, ...]:
    from millrace.bench.peers.bars import BARS, bars_for

    chosen = name or bars_for(model) or "none"
    if chosen == "none":
        return ()
    if chosen not in BARS:
        raise UsageError(f"Unknown bars '{chosen}'. Bars: {', '.join(BARS)}, none.")
    return BARS[chosen]


def _round_options(args: argparse.Namespace) -> RoundOptions:
    from millrace.bench.peers.rounds import RoundOptions

    rounds = (1 if args.quick else 2) if args.rounds is None else args.rounds
    minutes = 15.0 if args.minutes is None else args.minutes
    if not 1 <= rounds <= 100:
        raise UsageError(f"--rounds is {rounds}; it must be from 1 to 100.")
    for flag, value in (("--minutes", minutes), ("--time-limit", args.time_limit)):
        if not (math.isfinite(value) and value > 0):
            raise UsageError(f"{flag} is {value:g}; it must be greater than 0.")
    seed = int(time.time()) if args.content_seed is None else args.content_seed
    names = _names(args.workloads)
    return RoundOptions(
        workloads=_workloads(names, quick=args.quick),
        rounds=rounds,
        seed=seed,
        time_limit_s=args.time_limit,
        budget_s=60 * minutes,
        perplexity=not names or "perplexity" in names,
    )


def _workloads(names: list[str], *, quick: bool) -> tuple[Workload, ...]:
    """Cheap workloads first: if time runs short, these still get further rounds."""
    from millrace.bench.http.workloads import mixed, shared_prefix, single

    if quick:
        everything = {_SINGLE: single(1), _SHARED: shared_prefix(16), _MIXED: mixed(16)}
    else:
        everything = {_SINGLE: single(), _SHARED: shared_prefix(), _MIXED: mixed()}
    for name in names:
        if name not in (*everything, "perplexity"):
            raise UsageError(f"Unknown workload '{name}'. Workloads: {', '.join(everything)}, perplexity.")
    return tuple(work for name, work in everything.items() if not names or name in names)


def _selection(
    args: argparse.Namespace, loaded: LoadedConfig, bars: tuple[Bar, ...], options: RoundOptions
) -> EngineSelection:
    from millrace.bench.peers.selection import EngineSelection
    from millrace.bench.peers.spec import parse_peer, parse_peer_args

    return EngineSelection(
        bars=bars,
        workloads=options.workloads,
        given=[parse_peer(text) for text in args.peer],
        only=_names(args.only),
        everything=bool(args.everything),
        between=_idle_mode(args.between),
        pythons=args.peer_python,
        models=_peer_models(args, loaded),
        threads=loaded.config.run.threads,
        extra=dict(parse_peer_args(text) for text in args.peer_args),
    )


def _peer_models(args: argparse.Namespace, loaded: LoadedConfig) -> PeerModels:
    """The models given by options; the GGUF file defaults to the one that Millrace serves."""
    from millrace.bench.peers.installed import PeerModels
    from millrace.sources.resolve import resolve_model

    gguf = args.gguf
    if not gguf and not args.url:
        files = resolve_model(loaded.config.model.source)
        gguf = str(files.path) if files.kind == "gguf" else ""
    for flag, path in (("--gguf", gguf), ("--bf16-model", args.bf16_model), ("--openvino-model", args.openvino_model)):
        if path and not Path(path).exists():
            raise UsageError(f"{flag} {path}: no such file or directory.")
    return PeerModels(gguf, args.bf16_model, args.openvino_model or gguf)


def _names(text: str) -> list[str]:
    return list(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))


def _idle_mode(text: str) -> IdleMode:
    if text in ("", "pause"):
        return "pause"
    if text == "keep":
        return "keep"
    if text == "stop":
        return "stop"
    raise UsageError(f"--between is '{text}'; it must be pause, keep or stop.")


class Reporter:
    """Prints JSON lines as figures come, or tables at the end; progress and problems go to standard error."""

    def __init__(self, bars: tuple[Bar, ...], *, as_json: bool) -> None:
        from millrace.bench.peers.bars import ResultTable

        self._bars = bars
        self._as_json = as_json
        self._results = ResultTable()
        self._notes: list[str] = []
        self._line = StatusLine()

    def figure(self, engine: str, number: int, figure: Figure) -> None:
        from millrace.bench.peers.report import figure_line

        self._results.add(engine, (figure.workload, figure.metric), figure.value, figure.unit)
        if self._as_json:
            print(figure_line(engine, number, figure), flush=True)

    def progress(self, what: str, done: int, total: int) -> None:
        self._line.show(what, done, total)

    def problem(self, engine: str, sentence: str) -> None:
        self.note(f"{engine}: {sentence}")

    def note(self, sentence: str) -> None:
        """Print a problem at once in full, and its first line again below the tables."""
        self._notes.append(sentence.partition("\n")[0])
        self._line.clear()
        print(sentence, file=sys.stderr, flush=True)

    @property
    def is_complete(self) -> bool:
        """True if every bar could be judged, met or not."""
        return all(self._results.judge(bar).met is not None for bar in self._bars)

    def finish(self) -> None:
        from millrace.bench.peers.report import median_lines, print_tables, verdict_line

        self._line.clear()
        verdicts = [self._results.judge(bar) for bar in self._bars]
        if self._as_json:
            for line in (*median_lines(self._results), *map(verdict_line, verdicts)):
                print(line, flush=True)
        if self._results.keys:
            print_tables(self._results, verdicts, self._notes, sys.stderr if self._as_json else sys.stdout)
