"""`millrace postmortem`: the timeline of an incident from events, logs, audit and decision logs, and traces."""

from __future__ import annotations

import argparse
import re
import time
from datetime import UTC, datetime
from pathlib import Path

from millrace.terminal.parser import UsageError

USAGE = "millrace postmortem PATH... [options]"
EXAMPLES = """\
examples:
  millrace postmortem .millrace-fleet                          everything that went wrong, as Markdown
  millrace postmortem .millrace-fleet audit.jsonl --last 2h --out incident.md
  millrace postmortem .millrace-fleet --since 2026-11-18T14:00 --until 2026-11-18T14:30 --all"""
_LAST = re.compile(r"(\d+(?:\.\d+)?)([smhd])")
_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("paths", metavar="PATH", nargs="+", type=Path, help="a fleet's directory, or files")
    parser.add_argument("--since", default="", metavar="TIME", help="ISO time, UTC unless it says otherwise")
    parser.add_argument("--until", default="", metavar="TIME", help="the same for the end")
    parser.add_argument("--last", default="", metavar="N", help="instead: 30s, 15m, 2h or 1d until now")
    parser.add_argument("--all", action="store_true", help="also lines in which nothing is wrong")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the report there")


def run(args: argparse.Namespace) -> int:
    from millrace.fleet.postmortem import collect, report

    since, until = _window(args)
    entries = [entry for entry in collect(args.paths) if since <= entry.time <= until]
    if not entries:
        raise UsageError("Nothing happened in that time; choose a longer one.")
    text = report(entries, shows_all=args.all)
    if args.out is None:
        print(text, end="")
    else:
        args.out.write_text(text, encoding="utf-8")
        print(f"Wrote {args.out}.")
    return 0


def _window(args: argparse.Namespace) -> tuple[float, float]:
    if not args.last:
        return _time(args.since, 0.0), _time(args.until, float("inf"))
    found = _LAST.fullmatch(args.last)
    if found is None or args.since or args.until:
        raise UsageError(f"--last is {args.last!r}; use 30s, 15m, 2h or 1d, without --since and --until.")
    return time.time() - float(found[1]) * _UNITS[found[2]], float("inf")


def _time(text: str, usual: float) -> float:
    if not text:
        return usual
    try:
        when = datetime.fromisoformat(text)
    except ValueError:
        raise UsageError(f"{text!r} is no time; write 2026-11-18T14:00.") from None
    return (when if when.tzinfo is not None else when.replace(tzinfo=UTC)).timestamp()
