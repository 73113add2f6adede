"""`millrace calibrate`: measures a model's steps on this machine, writes a profile, and checks it."""

from __future__ import annotations

import argparse
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from millrace.terminal.parser import UsageError
from millrace.terminal.settings_options import LOCAL_MODEL_SETTINGS, add_model, add_settings, load_settings

if TYPE_CHECKING:
    from millrace.simulate.profile import Profile
    from millrace.simulate.real_engine import RealEngine
    from millrace.simulate.requests import SimulatedRequest

USAGE = "millrace calibrate [MODEL] [--minutes X] [--out FILE] [--check TRACE] [settings]"
EXAMPLES = """\
The engine's own scheduler makes the steps; a third of the runs is held out and gives the error.

examples:
  millrace calibrate                                     the default model, three minutes
  millrace calibrate ./my-model --minutes 5 --out my.json
  millrace calibrate ./my-model --profile my.json --check azure-conv.csv --seconds 60 --runs 3
  millrace simulate azure-conv.csv --profile my.json     what the machine would do"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    parser.add_argument(
        "--minutes", type=float, default=3.0, metavar="X", help="about how long to measure (default: 3)"
    )
    parser.add_argument("--out", type=Path, default=Path("profile.json"), metavar="FILE", help="default: profile.json")
    check = parser.add_argument_group("check of a profile against the real engine")
    check.add_argument("--profile", default="", metavar="FILE", help="check this profile; measure nothing")
    check.add_argument(
        "--check", default="", metavar="TRACE", help="run a trace on both; or RATE:PROMPT:OUTPUT, such as 2:200:50"
    )
    check.add_argument("--speed", type=float, default=1.0, metavar="X", help="of the trace (default: 1)")
    check.add_argument("--seconds", type=float, default=60.0, metavar="X", help="of arrivals (default: 60)")
    check.add_argument("--scale", type=float, default=1.0, metavar="X", help="of the trace's lengths (default: 1)")
    check.add_argument("--runs", type=int, default=3, metavar="N", help="of the real engine (default: 3)")
    add_settings(parser, sections=("model", "memory", "run", "plan"), taken=("seed",), shown=LOCAL_MODEL_SETTINGS)


def run(args: argparse.Namespace) -> int:
    if args.minutes <= 0 or args.runs < 1 or args.speed <= 0 or args.scale <= 0:
        raise UsageError("--minutes, --runs, --speed and --scale must be above 0.")
    if args.profile and not args.check:
        raise UsageError("--profile is what --check checks; give --check too.")
    from millrace.simulate.profile import read_profile
    from millrace.simulate.real_engine import RealEngine

    config = load_settings(args).config
    requests = _requests(args) if args.check else []
    profile = read_profile(args.profile) if args.profile else None
    engine = RealEngine(config)
    try:
        if profile is None:
            profile = _measure(args, engine, config.model.source)
        return _check(args, engine, profile, requests) if args.check else 0
    finally:
        engine.close()


def _measure(args: argparse.Namespace, engine: RealEngine, model: str) -> Profile:
    from millrace.simulate.calibrate import fit, measure, profile_of
    from millrace.simulate.profile import write_profile

    def show(runs: int, steps: int) -> None:
        if sys.stderr.isatty():
            print(f"\r\033[K{runs} runs, {steps:,} steps", end="", file=sys.stderr, flush=True)

    measured = measure(engine, args.minutes, show)
    if sys.stderr.isatty():
        print("\r\033[K", end="", file=sys.stderr)
    found = fit(measured)
    note = f"millrace calibrate --minutes {args.minutes:g}, {datetime.now(UTC):%Y-%m-%d}"
    profile = profile_of(engine, measured, found, model, note)
    write_profile(profile, args.out)
    rates = profile.rates
    print(f"{profile.model} on {profile.device}, {found.num_steps:,} steps")
    print(f"  step                {1e3 * rates.step_s:10.3f} ms")
    print(f"  prompt token        {1e6 * rates.prompt_token_s:10.3f} µs   up to {found.range[1]:,.0f} in a step")
    print(f"  decode row          {1e6 * rates.decode_row_s:10.3f} µs   up to {found.range[2]:,.0f} in a step")
    print(f"  token of context    {1e9 * rates.context_token_s:10.3f} ns   up to {found.range[3]:,.0f} in a step")
    print(f"  pair in a prompt    {1e9 * rates.pair_s:10.3f} ns   up to {found.range[4]:,.0f} in a step")
    print(f"  host                {1e3 * profile.host_s:10.3f} ms per step")
    print(f"  error of held-out steps {100 * found.error:.1f}%, spread of equal steps {100 * found.noise:.1f}%")
    print(f"written to {args.out}")
    return profile


def _requests(args: argparse.Namespace) -> list[SimulatedRequest]:
    from dataclasses import replace

    from millrace.load.lengths import Lengths
    from millrace.simulate.requests import Generated, read_requests

    try:
        rate, prompt, output = (float(part) for part in args.check.split(":"))
    except ValueError:
        found = read_requests(Path(args.check), args.speed, args.seconds)
        return [
            replace(
                one,
                num_prompt=max(1, round(args.scale * one.num_prompt)),
                num_output=max(1, round(args.scale * one.num_output)),
            )
            for one in found
        ]
    return Generated(
        rate=rate,
        seconds=args.seconds,
        prompt=Lengths("lognormal", prompt, 0.6),
        output=Lengths("lognormal", output, 0.6),
    ).requests()


def _check(args: argparse.Namespace, engine: RealEngine, profile: Profile, requests: list[SimulatedRequest]) -> int:
    from millrace.simulate.check import compare, table

    rows = compare(engine, profile, requests, args.runs, lambda text: print(text, file=sys.stderr))
    print(table(rows))
    return 0 if all(row.is_met for row in rows) else 1
