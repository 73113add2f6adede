"""`millrace bench peers`: Millrace and other engines side by side, in alternating turns of the same work."""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
import time
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
    from millrace.bench.peers.contestant import Between, Contestant
    from millrace.bench.peers.installed import PeerModels
    from millrace.bench.peers.line_up import LineUp
    from millrace.bench.peers.rounds import RoundOptions
    from millrace.config import LoadedConfig

EXAMPLES = """\
bench peers:
  Alternates between Millrace and every peer that is given by its address or found installed, on the workloads single,
  shared-prefix and mixed, and holds the medians to the bars. Installs nothing. docs/peers.md has the peers' commands.
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
    add("--peer", action="append", default=[], metavar="NAME=URL[,pid=N]", help="a running server; may be repeated")
    add("--peer-python", action="append", default=[], metavar="PATH", help="an interpreter that has peers installed")
    add("--peer-args", action="append", default=[], metavar="NAME=ARGS", help="further arguments of a peer's command")
    add("--gguf", default="", metavar="FILE", help="the model for llama.cpp (default: the one that Millrace serves)")
    add("--bf16-model", default="", metavar="DIR", help="the same model as safetensors, for vLLM")
    add("--openvino-model", default="", metavar="PATH", help="for OpenVINO (default: the GGUF file)")
    add("--only", default="", metavar="NAMES", help="only these peers, separated by commas")
    add("--rounds", type=int, metavar="N", help="turns of each engine (default: 2)")
    add("--minutes", type=float, metavar="X", help="start no work that would not fit (default: 15)")
    add("--between", default="", metavar="WHAT", help="engines started here, out of their turn: pause, keep or stop")
    add("--bars", default="", metavar="NAME", help="smollm2-135m, qwen2.5-coder-1.5b or none (default: by the model)")
    add(
        "--everything",
        action="store_true",
        default=None,
        help="all engines through all workloads, not only where a bar asks",
    )


def refuse_elsewhere(args: argparse.Namespace) -> None:
    for name in _OWN_OPTIONS:
        if getattr(args, name) not in (None, "", []):
            flag = f"--{name.replace('_', '-')}"
            raise UsageError(f"{flag} belongs to another benchmark; write: millrace bench peers {flag} …")


def run(args: argparse.Namespace) -> int:
    import uvloop

    from millrace.bench.peers.line_up import millrace_by_url, millrace_started, peers

    loaded = load_settings(args)
    bars, options = _bars(args.bars, loaded.config.model.source), _round_options(args)
    reporter = Reporter(bars, as_json=args.json)
    line_up = _line_up(args, loaded, bars, options)
    others = peers(line_up, reporter.note)
    with tempfile.TemporaryDirectory() as folder:
        settings = Path(folder) / "settings.toml"
        settings.write_text("\n".join(toml_lines(loaded)), encoding="utf-8")
        if args.url:
            own = millrace_by_url(line_up, args.url, args.pid, args.api_key)
        else:
            own = millrace_started(line_up, ["--config", str(settings)])
        try:
            uvloop.run(_compare([own, *others], options, reporter))
        finally:
            reporter.finish()
    return 0 if reporter.is_complete else 1


async def _compare(contestants: list[Contestant], options: RoundOptions, reporter: Reporter) -> None:
    from millrace.bench.local_server import end_on_sigterm
    from millrace.bench.peers.rounds import Comparison, Listener

    end_on_sigterm()
    listener = Listener(reporter.figure, reporter.progress, reporter.problem)
    await Comparison(contestants, options, listener).run()


def _bars(name: str, model: str) -> tuple[Bar, ...]:
    from millrace.bench.peers.bars import BARS, bars_for

    chosen = name or bars_for(model) or "none"
    if chosen == "none":
        return ()
    if chosen not in BARS:
        raise UsageError(f"There are no bars '{chosen}'. There are: {', '.join(BARS)}, none.")
    return BARS[chosen]


def _round_options(args: argparse.Namespace) -> RoundOptions:
    from millrace.bench.peers.rounds import RoundOptions

    rounds = (1 if args.quick else 2) if args.rounds is None else args.rounds
    minutes = 15.0 if args.minutes is None else args.minutes
    if not 1 <= rounds <= 100:
        raise UsageError(f"--rounds is {rounds}; it must be from 1 to 100.")
    for flag, value in (("--minutes", minutes), ("--time-limit", args.time_limit)):
        if not (math.isfinite(value) and value > 0):
            raise UsageError(f"{flag} is {value:g}; it must be more than 0.")
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
    """The cheap ones first: they get their further rounds even where the time does not do for the rest."""
    from millrace.bench.http.workloads import mixed, shared_prefix, single

    if quick:
        everything = {_SINGLE: single(1), _SHARED: shared_prefix(16), _MIXED: mixed(16)}
    else:
        everything = {_SINGLE: single(), _SHARED: shared_prefix(), _MIXED: mixed()}
    for name in names:
        if name not in (*everything, "perplexity"):
            raise UsageError(f"There is no workload '{name}' here. There are: {', '.join(everything)}, perplexity.")
    return tuple(work for name, work in everything.items() if not names or name in names)


def _line_up(args: argparse.Namespace, loaded: LoadedConfig, bars: tuple[Bar, ...], options: RoundOptions) -> LineUp:
    from millrace.bench.peers.line_up import LineUp
    from millrace.bench.peers.spec import parse_peer, parse_peer_args

    return LineUp(
        bars=bars,
        workloads=options.workloads,
        given=[parse_peer(text) for text in args.peer],
        only=_names(args.only),
        everything=bool(args.everything),
        between=_between(args.between),
        pythons=args.peer_python,
        models=_peer_models(args, loaded),
        threads=loaded.config.run.threads,
        extra=dict(parse_peer_args(text) for text in args.peer_args),
    )


def _peer_models(args: argparse.Namespace, loaded: LoadedConfig) -> PeerModels:
    """The GGUF file that Millrace serves, if it is one, unless others are given."""
    from millrace.bench.peers.installed import PeerModels
    from millrace.sources.resolve import resolve_model

    gguf = args.gguf
    if not gguf and not args.url:
        files = resolve_model(loaded.config.model.source)
        gguf = str(files.path) if files.kind == "gguf" else ""
    for flag, path in (("--gguf", gguf), ("--bf16-model", args.bf16_model), ("--openvino-model", args.openvino_model)):
        if path and not Path(path).exists():
            raise UsageError(f"{flag} is {path}, and there is no such file or directory.")
    return PeerModels(gguf, args.bf16_model, args.openvino_model or gguf)


def _names(text: str) -> list[str]:
    return list(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))


def _between(text: str) -> Between:
    if text in ("", "pause"):
        return "pause"
    if text == "keep":
        return "keep"
    if text == "stop":
        return "stop"
    raise UsageError(f"--between is '{text}'; it must be pause, keep or stop.")


class Reporter:
    """Figures as they come on JSON lines, or tables at the end; progress and problems on standard error."""

    def __init__(self, bars: tuple[Bar, ...], *, as_json: bool) -> None:
        from millrace.bench.peers.bars import Board

        self._bars = bars
        self._as_json = as_json
        self._board = Board()
        self._notes: list[str] = []
        self._line = StatusLine()

    def figure(self, engine: str, number: int, figure: Figure) -> None:
        from millrace.bench.peers.report import figure_line

        self._board.add(engine, (figure.workload, figure.metric), figure.value, figure.unit)
        if self._as_json:
            print(figure_line(engine, number, figure), flush=True)

    def progress(self, what: str, done: int, total: int) -> None:
        self._line.show(what, done, total)

    def problem(self, engine: str, sentence: str) -> None:
        self.note(f"{engine}: {sentence}")

    def note(self, sentence: str) -> None:
        """Said at once in full, such as with a server's last words; its first line again below the tables."""
        self._notes.append(sentence.partition("\n")[0])
        self._line.clear()
        print(sentence, file=sys.stderr, flush=True)

    @property
    def is_complete(self) -> bool:
        """Whether every bar could be judged; whether it was met is for the reader."""
        return all(self._board.judge(bar).met is not None for bar in self._bars)

    def finish(self) -> None:
        from millrace.bench.peers.report import median_lines, print_tables, verdict_line

        self._line.clear()
        verdicts = [self._board.judge(bar) for bar in self._bars]
        if self._as_json:
            for line in (*median_lines(self._board), *map(verdict_line, verdicts)):
                print(line, flush=True)
        if self._board.keys:
            print_tables(self._board, verdicts, self._notes, sys.stderr if self._as_json else sys.stdout)
