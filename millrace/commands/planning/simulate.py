"""`millrace simulate`: the engine's own scheduler on a trace, with priced steps and a virtual clock."""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from millrace.terminal.parser import UsageError

if TYPE_CHECKING:
    from millrace.simulate.profile import Profile
    from millrace.simulate.report import Variant
    from millrace.simulate.requests import SimulatedRequest
    from millrace.simulate.settings import SimulationSettings

USAGE = "millrace simulate [TRACE] --profile PROFILE [--what-if NAME=VALUE,…] [options]"
EXAMPLES = """\
Scheduler and cycle are the engine's own; only the device is replaced by step times. The same arguments give the same
figures, bit for bit.

settings of --set and --what-if: policy, batching, prefix_cache, aging_s, max_running, token_budget, mixed_budget,
step_ms, block_size, kv_tokens, kv_host_gib, kv_disk_gib, disk_gb_per_s, drafts, adaptive, acceptance, max_tokens,
deadline_s, replicas, routing, noise

examples:
  millrace simulate azure-conv.csv --profile h200-8b --speed 4   a trace, four times as fast
  millrace simulate --profile h200-8b --rate 8 --prefix 2000     generated, with a shared prefix
  millrace simulate mooncake.jsonl --profile h200-8b --set replicas=4 --what-if routing=prefix
  millrace simulate audit.jsonl --profile mine.json --what-if policy=shortest --what-if drafts=3,acceptance=0.6
  millrace simulate azure-conv.csv --device "h100 hbm3" --memory 80 --model llama3.1-8b    from a data sheet"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_workload(parser)
    add_machine(parser)
    what = parser.add_argument_group("what is simulated")
    what.add_argument("--set", default="", metavar="SETTINGS", help="settings of the engine, as NAME=VALUE,…")
    what.add_argument(
        "--what-if", action="append", default=[], metavar="SETTINGS", help="a further run with other settings; repeat"
    )
    what.add_argument("--slo", action="append", default=[], metavar="TEXT", help='such as "ttft p95 < 500 ms"; repeat')
    what.add_argument(
        "--processes",
        type=int,
        default=0,
        metavar="N",
        help="that share the replicas; results do not depend on it (default: one per core, for many requests)",
    )
    what.add_argument(
        "--interval", action="store_true", help="also on machines faster and slower by the profile's error"
    )
    what.add_argument(
        "--extrapolate", action="store_true", help="go on where most steps are larger than any measured one"
    )
    out = parser.add_argument_group("output")
    out.add_argument("--json", type=Path, metavar="FILE", help="write the report as JSON")
    out.add_argument("--html", type=Path, metavar="FILE", help="write the report as HTML, with plots")


def add_workload(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "trace", nargs="?", type=Path, metavar="TRACE", help="Azure CSV, Mooncake JSON lines, or a server's audit log"
    )
    what = parser.add_argument_group("workload")
    what.add_argument("--speed", type=float, default=1.0, metavar="X", help="of the trace (default: 1)")
    what.add_argument("--seconds", type=float, default=0.0, metavar="X", help="of arrivals (trace: all; else 300)")
    what.add_argument("--rate", type=float, default=0.0, metavar="X", help="without a trace: requests per second")
    what.add_argument("--arrivals", default="poisson", choices=("poisson", "gamma", "constant"), help="with --rate")
    what.add_argument("--burstiness", type=float, default=3.0, metavar="X", help="of gamma: 1 = Poisson (default: 3)")
    what.add_argument("--prompt", default="lognormal:400:0.8", metavar="LENGTHS", help="prompt tokens, with --rate")
    what.add_argument("--output", default="lognormal:150:0.7", metavar="LENGTHS", help="output tokens, with --rate")
    what.add_argument("--prefix", type=int, default=0, metavar="N", help="tokens of a shared prefix, with --rate")
    what.add_argument("--prefixes", type=int, default=1, metavar="N", help="number of such prefixes (default: 1)")
    what.add_argument("--classes", default="", metavar="SHARES", help="interactive:standard:batch, such as 0.5:0.3:0.2")
    what.add_argument("--tenants", type=int, default=1, metavar="N", help="number of tenants, with --rate")
    what.add_argument("--seed", type=int, default=0, metavar="N", help="random seed (default: 0)")


def add_machine(parser: argparse.ArgumentParser) -> None:
    where = parser.add_argument_group("machine")
    where.add_argument(
        "--profile", default="", metavar="PROFILE", help="file of `millrace calibrate`, or a shipped name"
    )
    where.add_argument("--device", default="", metavar="NAME", help="instead: a GPU by its data sheet, such as h200")
    where.add_argument("--memory", type=float, default=0.0, metavar="GIB", help="its memory, with --device")
    where.add_argument("--model", default="", metavar="MODEL", help="the model, with --device")


def run(args: argparse.Namespace) -> int:
    from millrace.host.cores import usable_cores
    from millrace.observe.slo.objective import parse_objective
    from millrace.simulate.report import Variant, as_json, html_page, notes, plots, table
    from millrace.simulate.settings import SimulationSettings
    from millrace.simulate.simulation import simulate

    profile, requests = machine_of(args), workload_of(args)
    base = SimulationSettings().changed(args.set)
    asked = [(args.set or "base", base), *((text, base.changed(text)) for text in args.what_if)]
    objectives = tuple(parse_objective(text) for text in args.slo)
    num_processes = args.processes or (usable_cores() if len(requests) >= MANY_REQUESTS else 1)
    variants: list[Variant] = []
    for name, settings in asked:
        began = time.monotonic()

        def simulated(factor: float, settings: SimulationSettings = settings):  # type: ignore[no-untyped-def]
            return simulate(
                requests,
                profile.scaled(factor),
                settings,
                seed=args.seed,
                objectives=objectives,
                num_processes=num_processes,
            )

        error = profile.error
        bounds = (simulated(1 / (1 + error)), simulated(1 + error)) if args.interval else None
        variants.append(Variant(name, settings, simulated(1.0), bounds))
        check_range(variants[-1], allowed=args.extrapolate)
        done = variants[-1].result
        print(
            f"{name}: {done.outcome.seconds:,.0f} s and {done.counts.steps:,} steps simulated in"
            f" {time.monotonic() - began:.1f} s",
            file=sys.stderr,
        )
    text = "\n".join([table(variants), "", *notes(profile, variants)])
    print(text)
    if args.json:
        report = as_json(profile, workload_facts(args, requests), variants)
        args.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    if args.html:
        args.html.write_text(html_page("Simulation", text, plots(variants)), encoding="utf-8")
    return 0 if all(variants[0].result.outcome.meets(objective) for objective in objectives) else 1


REFUSED_SHARE = 0.5
MANY_REQUESTS = 2000
"""Below this number, starting processes takes longer than they save."""


def check_range(variant: Variant, *, allowed: bool) -> None:
    share = variant.result.counts.outside_share
    if share > REFUSED_SHARE and not allowed:
        raise UsageError(
            f"{variant.name}: {100 * share:.0f}% of the device time is in steps larger than any that the profile was"
            " measured with. Calibrate with larger steps, or add --extrapolate to see the figures nevertheless."
        )


def machine_of(args: argparse.Namespace) -> Profile:
    from millrace.simulate.profile import read_profile, shipped_profiles

    if bool(args.profile) == bool(args.device):
        raise UsageError(
            "Give either --profile (a file of `millrace calibrate`, or one of"
            f" {', '.join(shipped_profiles())}) or --device with --memory and --model."
        )
    if args.profile:
        return read_profile(args.profile)
    if not args.model or args.memory <= 0:
        raise UsageError("--device needs --memory (GiB) and --model.")
    from millrace.simulate.data_sheet import data_sheet_profile

    return data_sheet_profile(args.device, args.memory, args.model)


def workload_of(args: argparse.Namespace) -> list[SimulatedRequest]:
    from millrace.load.lengths import parse_lengths
    from millrace.simulate.requests import Generated, read_requests, with_classes

    for name in ("speed", "burstiness", "prefixes", "tenants"):
        if getattr(args, name) <= 0:
            raise UsageError(f"--{name} is {getattr(args, name):g}; it must be above 0.")
    if (args.trace is None) == (args.rate <= 0):
        raise UsageError("Give either a trace or --rate.")
    classes = _classes(args.classes)
    if args.trace is not None:
        found = read_requests(args.trace, args.speed, args.seconds)
        return with_classes(found, classes, args.seed) if args.classes else found
    return Generated(
        rate=args.rate,
        seconds=args.seconds or 300.0,
        prompt=parse_lengths(args.prompt, "--prompt"),
        output=parse_lengths(args.output, "--output"),
        arrivals=args.arrivals,
        burstiness=args.burstiness,
        prefix_tokens=args.prefix,
        num_prefixes=args.prefixes,
        classes=classes,
        num_tenants=args.tenants,
        seed=args.seed,
    ).requests()


def _classes(text: str) -> tuple[float, ...]:
    if not text:
        return (0.0, 1.0, 0.0)
    try:
        shares = tuple(float(part) for part in text.split(":"))
    except ValueError:
        shares = ()
    if len(shares) != 3 or min(shares) < 0 or sum(shares) <= 0:
        raise UsageError(f"--classes is {text!r}; it must be three shares, such as 0.5:0.3:0.2.")
    return shares


def workload_facts(args: argparse.Namespace, requests: list[SimulatedRequest]) -> dict[str, object]:
    """For the report."""
    names = ("speed", "rate", "arrivals", "burstiness", "prompt", "output", "prefix", "prefixes", "classes", "seed")
    return {
        "trace": args.trace.name if args.trace is not None else None,
        **{name: getattr(args, name) for name in names},
        "requests": len(requests),
        "seconds": max((one.at_s for one in requests), default=0.0),
    }
