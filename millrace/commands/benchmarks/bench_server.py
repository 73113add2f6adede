"""`millrace bench` itself: the workloads on a server, which is started here unless `--url` names one."""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from millrace.commands.benchmarks.printing import until_terminated
from millrace.terminal.parser import UsageError
from millrace.terminal.settings_options import load_settings
from millrace.terminal.settings_table import toml_lines
from millrace.terminal.status_line import StatusLine

if TYPE_CHECKING:
    from millrace.bench.figures import Figure
    from millrace.bench.http.suite import SuiteOptions
    from millrace.bench.http.workloads import Workload

_PERPLEXITY = "perplexity"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--url", default="", help="measure this server instead of starting one")
    parser.add_argument("--api-key", default="", help="API key for the server")
    parser.add_argument(
        "--pid", type=int, default=0, help="process id of the server, to report its memory (with --url)"
    )
    parser.add_argument("--workloads", default="", metavar="NAMES", help="only these workloads, separated by commas")
    parser.add_argument(
        "--time-limit", type=float, default=300.0, metavar="X", help="seconds per workload (default: 300)"
    )
    parser.add_argument(
        "--content-seed", type=int, metavar="N", help="seed of the prompts (default: a new one each run)"
    )


def run(args: argparse.Namespace) -> int:
    import uvloop

    loaded = load_settings(args)
    if not args.time_limit > 0:
        raise UsageError(f"--time-limit is {args.time_limit:g}; it must be greater than 0.")
    settings = "\n".join(toml_lines(loaded))
    source = loaded.config.model.source if loaded.sources["model.source"] != "default" else ""
    # The clients share the cores with the server; on uvloop they take half as much CPU.
    return until_terminated(lambda: uvloop.run(_measure(args, settings, source)))


async def _measure(args: argparse.Namespace, settings: str, source: str) -> int:
    from millrace.bench.http.suite import SuiteOptions, run_local, run_remote
    from millrace.bench.http.target import Target
    from millrace.bench.local_server import cancel_on_sigterm

    cancel_on_sigterm()
    seed = int(time.time()) if args.content_seed is None else args.content_seed
    workloads, perplexity = _chosen(args.workloads)
    options = SuiteOptions(workloads, seed, args.time_limit, args.pid, perplexity)
    reporter = Reporter(args.url or "local", options, as_json=args.json)
    if args.url:
        await run_remote(Target(args.url, source, args.api_key), options, reporter.add, reporter.progress)
    else:
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "settings.toml"
            file.write_text(settings, encoding="utf-8")
            await run_local(["--config", str(file)], options, reporter.add, reporter.progress)
    reporter.finish()
    return 0


def _chosen(names: str) -> tuple[tuple[Workload, ...], bool]:
    """The workloads to run, and whether to measure perplexity after them."""
    from millrace.bench.http.workloads import suite

    everything = {workload.name: workload for workload in suite()}
    if not names:
        return tuple(everything.values()), True
    wanted = [name.strip() for name in names.split(",") if name.strip()]
    for name in wanted:
        if name not in (*everything, _PERPLEXITY):
            raise UsageError(f"Unknown workload '{name}'. Workloads: {', '.join((*everything, _PERPLEXITY))}.")
    return tuple(workload for name, workload in everything.items() if name in wanted), _PERPLEXITY in wanted


class Reporter:
    """Prints JSON lines as figures come, or one table at the end with a status line until then."""

    def __init__(self, target: str, options: SuiteOptions, *, as_json: bool) -> None:
        self._target = target
        self._seed = options.seed
        self._as_json = as_json
        self._figures: list[Figure] = []
        self._line = StatusLine()

    def add(self, figure: Figure) -> None:
        self._figures.append(figure)
        if self._as_json:
            print(figure.as_json(target=self._target), flush=True)

    def progress(self, what: str, done: int, total: int) -> None:
        self._line.show(what, done, total)

    def finish(self) -> None:
        from millrace.bench.figures import print_table

        self._line.clear()
        if not self._as_json:
            figures = sorted(self._figures, key=lambda figure: figure.workload != "server")
            print_table(figures, f"millrace bench of {self._target}, prompts from seed {self._seed}")
