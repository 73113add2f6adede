"""`millrace bench`: measures this machine, any OpenAI-compatible server, peers, one layer alone, or a GPU."""

from __future__ import annotations

import argparse
from collections.abc import Callable

from millrace.commands.benchmarks import (
    bench_encode,
    bench_formats,
    bench_front,
    bench_gpu,
    bench_micro,
    bench_observe,
    bench_peers,
    bench_serve,
    bench_server,
    bench_smooth,
    bench_speculate,
    bench_traces,
)
from millrace.commands.benchmarks.printing import until_terminated
from millrace.terminal.parser import UsageError
from millrace.terminal.settings_options import add_settings

BENCHMARKS = (
    "local, peers, formats, plan, counting, step, encode, front, gateway, serve, observe, speculate, smooth, policies,"
    " eviction, kv-tiers, fetch, adapters, adapter-load, replay, gpu"
)
USAGE = "millrace bench [WHAT] [options]"
_EXAMPLES = """\
workloads:
  single         512 in / 128 out, one at a time
  batch-1/4/16   256 in / 64 out, all at once
  mixed          64 requests, 64–512 in / 64–256 out, 16 at once
  shared-prefix  64 requests, 1,024 shared + 32 own in / 32 out, 8 at once
  prefix-cold    1,056 in, never seen before, one at a time
  prefix-warm    the same prefixes again, one at a time
  perplexity     of a fixed text, through the API: what the settings cost in quality

examples:
  millrace bench                                         start the default model here and measure everything
  millrace bench --model ./my-model --dtype bfloat16     another model, with settings as for serve
  millrace bench --url http://127.0.0.1:8080             any OpenAI-compatible server, the same workloads
  millrace bench --url … --workloads single --json       one JSON line per figure
  millrace bench counting                                what counting figures costs per step
  millrace bench plan                                    host time of the scheduler: decode steps, first tokens,
                                                         and of a step's bytes
  millrace bench adapters                                steps with 1, 4 and 16 adapters beside steps without
  millrace bench adapters --models llama-3.1-8b          the same on a GPU, with random weights of that shape
  millrace bench step                                    time of a CPU step by kind of work
  millrace bench adapter-load                            1,000 adapters with room for 64; a stream beside loading;
                                                         on a GPU with --models llama-3.1-8b
  millrace bench encode --model DIR --reference PYTHON   an encoder beside sentence-transformers and ONNX Runtime
  millrace bench encode --models minilm,bge-large --reference PYTHON
                                                         the same with random weights in these shapes, without a hub
  millrace bench encode --model minilm --beside smollm2 --texts 10000
                                                         a chat stream while an embedder has 10,000 texts to embed
  millrace bench front --streams 64,512,2048             fronts over a null engine: tokens/s, µs of CPU per token
  millrace bench front --fronts 1,2 --streams 512        the same with one front and with two
  millrace bench gateway --streams 256                   a gateway over null replicas: added latency, tokens/s,
                                                         hit rates per policy; --svg FILE draws them
  millrace bench gateway --keys --token-ms 15            the same with and without API keys and quotas, in turns
  millrace bench gateway --streams 2048 --token-ms 15 --gateways 2 --cores 0,1 --replicas 8 --clients 4
                                                         the bars of two cores, on a machine with 16
  millrace bench smooth                                  streams beside a long prompt, a small tenant beside 60 streams:
                                                         about two minutes; longer with --rounds 4 --seconds 30
  millrace bench replay --step-log steps.log             run the steps of `serve --step-log` again, compare tokens
  millrace bench policies --trace trace.csv --svg p.svg  scheduling policies on a recorded trace, simulated device
  millrace bench eviction --trace trace.jsonl            policies of eviction on a trace with prefixes (Mooncake)
  millrace bench kv-tiers --svg tiers.svg                a working set of four pools: no tier, host memory, a disk too
  millrace bench kv-tiers --trace trace.jsonl            what a disk keeps of a trace with prefixes, by policy
  millrace bench fetch --tokens 1300                     a prompt's KV from another replica against computing it"""
_ALLOWED = {
    "adapters": ("models", "shapes"),
    "encode": ("models",),
    "adapter-load": ("models", "shapes"),
    "peers": ("quick",),
    "formats": ("models", "batches"),
    "speculate": ("models", "shapes", "batches"),
}
"""Options of `bench gpu` that other benchmarks take too."""
_ROUNDS = ("observe", "speculate", "smooth", "fetch", "gateway")
"""Benchmarks that take `--rounds`, beside `peers`."""
_MODULES = (bench_peers, bench_formats, bench_serve, bench_observe, bench_speculate, bench_gpu)
EXAMPLES = "\n\n".join([_EXAMPLES, *(module.EXAMPLES for module in _MODULES)])


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "what",
        nargs="?",
        default="local",
        metavar="WHAT",
        help=f"{BENCHMARKS} (default: local)",
    )
    bench_server.add_arguments(parser)
    bench_front.add_arguments(parser)
    bench_traces.add_arguments(parser)
    bench_encode.add_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON line per figure instead of a table")
    bench_peers.add_arguments(parser)
    bench_serve.add_arguments(parser)
    bench_formats.add_arguments(parser)
    bench_gpu.add_arguments(parser)
    bench_speculate.add_arguments(parser)
    add_settings(parser, taken=("fronts", "step_ms"))


def run(args: argparse.Namespace) -> int:
    if args.keys and args.what != "gateway":
        raise UsageError("--keys is for bench gateway.")
    if args.what != "peers":
        bench_peers.reject_own_options(args, allowed=("rounds",) if args.what in _ROUNDS else ())
    if args.what == "gpu":
        return bench_gpu.run(args)
    if args.what == "serve":
        return bench_serve.run(args)
    bench_gpu.reject_own_options(args, allowed=_ALLOWED.get(args.what, ()))
    bench_serve.reject_own_options(args)
    actions: dict[str, Callable[[argparse.Namespace], int]] = {
        "local": bench_server.run,
        "peers": lambda args: until_terminated(lambda: bench_peers.run(args)),
        "formats": bench_formats.run,
        "plan": bench_micro.run_plan,
        "counting": bench_micro.run_counting,
        "step": bench_micro.run_step,
        "adapter-load": bench_micro.run_adapter_load,
        "encode": bench_encode.run,
        "front": bench_front.run,
        "gateway": lambda args: until_terminated(lambda: bench_front.run_gateway(args)),
        "observe": bench_observe.run,
        "speculate": bench_speculate.run,
        "smooth": lambda args: until_terminated(lambda: bench_smooth.run(args)),
        "policies": bench_traces.run_policies,
        "eviction": bench_traces.run_eviction,
        "kv-tiers": bench_traces.run_kv_tiers,
        "adapters": bench_micro.run_adapters,
        "fetch": bench_traces.run_fetch,
        "replay": bench_micro.run_replay,
    }
    if args.what not in actions:
        raise UsageError(f"Unknown benchmark '{args.what}'. Benchmarks: {BENCHMARKS}; use --url for a running server.")
    return actions[args.what](args)
