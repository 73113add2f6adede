"""`millrace bench smooth`: streams beside long prompts, and a small tenant beside many streams."""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from millrace.commands.benchmarks.printing import print_figures
from millrace.terminal.parser import UsageError, numbers
from millrace.terminal.settings_options import load_settings
from millrace.terminal.settings_table import toml_lines
from millrace.terminal.status_line import StatusLine

if TYPE_CHECKING:
    from millrace.bench.figures import Figure


def run(args: argparse.Namespace) -> int:
    import uvloop

    from millrace.bench.http.smooth import SmoothBench, verdicts
    from millrace.bench.local_server import cancel_on_sigterm

    if args.rounds is not None and not 1 <= args.rounds <= 100:
        raise UsageError(f"--rounds is {args.rounds}; it must be from 1 to 100.")
    code = 0
    for streams in numbers("--streams", args.streams or "60"):
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "settings.toml"
            file.write_text("\n".join(toml_lines(load_settings(args))), encoding="utf-8")
            line = StatusLine()
            bench = SmoothBench(
                ("--config", str(file)),
                streams=streams,
                seconds=args.seconds or 10.0,
                rounds=args.rounds,
                seed=int(time.time()) if args.content_seed is None else args.content_seed,
            )

            async def measure(bench: SmoothBench = bench, line: StatusLine = line) -> list[Figure]:
                cancel_on_sigterm()
                return await bench.run(line.show)

            figures = uvloop.run(measure())
            line.clear()
        title = f"Streams beside another tenant's work; many streams are {streams}"
        code = max(code, print_figures(figures, title, "smooth", as_json=args.json))
        if not args.json:
            print("\n".join(verdicts(figures)))
    return code
