"""`millrace bench front` and `gateway`: what HTTP costs, over engines and replicas that compute nothing."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from millrace.commands.benchmarks.printing import print_figures
from millrace.terminal.parser import UsageError, numbers
from millrace.terminal.settings_options import load_settings

if TYPE_CHECKING:
    from millrace.bench.figures import Figure

TOKEN_MS = (0.0, 40.0)
"""Null replicas that answer at once, and with the pace of an engine: then each token is read and written by itself."""
POLICY_REPLICAS = 4
TRACE_REQUESTS = 3000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    front = parser.add_argument_group("bench front")
    front.add_argument("--streams", default="", metavar="N,…", help="open streams (default: 64,512)")
    front.add_argument("--fronts", default="", metavar="N,…", help="front processes (default: 1)")
    front.add_argument("--tokens", type=int, default=128, metavar="N", help="tokens per request (default: 128)")
    front.add_argument("--seconds", type=float, default=0.0, metavar="X", help="duration (default: 5)")
    front.add_argument("--step-ms", type=float, default=2.0, metavar="X", help="minimum step time (default: 2)")
    front.add_argument("--clients", type=int, default=0, metavar="N", help="client processes (default: 1)")
    gateway = parser.add_argument_group("bench gateway")
    gateway.add_argument(
        "--token-ms", type=float, metavar="X", help="time per token of a stream, and no policies (default: 0 and 40)"
    )
    gateway.add_argument("--gateways", type=int, default=1, metavar="N", help="processes behind one port (default: 1)")
    gateway.add_argument("--replicas", type=int, default=4, metavar="N", help="null replicas (default: 4)")
    gateway.add_argument(
        "--keys", action="store_true", help="what API keys and quotas cost, in --rounds turns, and nothing else"
    )
    gateway.add_argument("--cores", default="", metavar="N,…", help="cores of the gateways, kept free of all else")


def run(args: argparse.Namespace) -> int:
    from millrace.bench.micro.front import FrontBench

    source = load_settings(args).config.model.source
    benches = [
        FrontBench(source, fronts, streams, args.tokens, args.seconds or 5.0, args.step_ms, args.clients or 1)
        for fronts in numbers("--fronts", args.fronts or "1")
        for streams in numbers("--streams", args.streams or "64,512")
    ]
    figures = (figure for bench in benches for figure in bench.run().figures())
    return print_figures(
        figures, f"Fronts over a null engine, {args.tokens} tokens per request", "front", as_json=args.json
    )


def run_gateway(args: argparse.Namespace) -> int:
    import uvloop

    from millrace.bench.gateway.keys import KeysBench
    from millrace.bench.gateway.policies import (
        CACHED_TOKENS,
        PROMPT_TOKENS_PER_S,
        TRACE_CACHED_TOKENS,
        TRACE_PROMPT_TOKENS_PER_S,
        conversations,
        plot,
        policy_figures,
        read_trace,
    )
    from millrace.bench.gateway.run import GatewayBench
    from millrace.bench.local_server import cancel_on_sigterm

    async def measured(bench: GatewayBench | KeysBench) -> list[Figure]:
        cancel_on_sigterm()
        return await bench.run()

    if args.rounds is not None and not args.keys:
        raise UsageError("--rounds is for bench gateway --keys.")
    figures: list[Figure] = []
    cores = tuple(numbers("--cores", args.cores, least=0)) if args.cores else ()
    for streams in numbers("--streams", args.streams or "256"):
        for token_ms in TOKEN_MS if args.token_ms is None else (args.token_ms,):
            bench = GatewayBench(
                num_replicas=args.replicas,
                num_streams=streams,
                num_tokens=args.tokens,
                seconds=args.seconds or 5.0,
                token_ms=token_ms,
                num_gateways=args.gateways,
                num_clients=args.clients or 1,
                cores=cores,
            )
            figures += uvloop.run(measured(KeysBench(bench, args.rounds or 4) if args.keys else bench))
    if args.keys:
        return print_figures(figures, "API keys and quotas at a gateway", "gateway", as_json=args.json)
    if args.token_ms is not None:  # Only the gateway is asked about.
        return print_figures(figures, "A gateway over null replicas", "gateway", as_json=args.json)
    if args.trace is not None:
        traffic = read_trace(args.trace, POLICY_REPLICAS)
        figures += policy_figures(traffic, TRACE_CACHED_TOKENS, TRACE_PROMPT_TOKENS_PER_S)
    else:
        traffic = conversations(POLICY_REPLICAS, args.requests or TRACE_REQUESTS)
        figures += policy_figures(traffic, CACHED_TOKENS, PROMPT_TOKENS_PER_S)
    if args.svg is not None:
        name = args.trace.name if args.trace is not None else "made-up conversations"
        args.svg.write_text(plot(figures, f"{len(traffic)} requests of {name}, {POLICY_REPLICAS} replicas"))
    return print_figures(
        figures, "A gateway over null replicas, and policies on one traffic", "gateway", as_json=args.json
    )
