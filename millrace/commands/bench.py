"""`millrace bench`: measures this machine, any OpenAI-compatible server, peers, one layer alone, or a GPU."""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from millrace.commands import bench_gpu, bench_observe, bench_peers, bench_serve, bench_speculate
from millrace.commands.figures import formats
from millrace.terminal.parser import UsageError, numbers
from millrace.terminal.settings_options import add_settings, load_settings
from millrace.terminal.settings_table import toml_lines
from millrace.terminal.status_line import StatusLine

if TYPE_CHECKING:
    from millrace.bench.figures import Figure
    from millrace.bench.http.suite import SuiteOptions
    from millrace.bench.http.workloads import Workload

BENCHMARKS = (
    "local, peers, formats, plan, counting, step, encode, front, gateway, serve, observe, speculate, smooth, policies,"
    " eviction, kv-tiers, fetch, adapters, adapter-load, replay, gpu"
)
USAGE = "millrace bench [WHAT] [options]"
EXIT_TERMINATED = 143
"""The exit code that shells report after SIGTERM."""
_PERPLEXITY = "perplexity"
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
_TOKEN_MS = (0.0, 40.0)
"""Null replicas that answer at once, and with the pace of an engine: then each token is read and written by itself."""
_POLICY_REPLICAS, _TRACE_REQUESTS, _TIER_REQUESTS = 4, 3000, 64
_BESIDE_WORDS, _SMOOTH_MS = 24, 200.0
"""Longest text of `bench encode --beside`, and the target of a step if none is given."""
_ROUNDS = ("observe", "speculate", "smooth", "fetch", "gateway")
"""Benchmarks that take `--rounds`, beside `peers`."""
_MODULES = (bench_peers, formats, bench_serve, bench_observe, bench_speculate, bench_gpu)
EXAMPLES = "\n\n".join([_EXAMPLES, *(module.EXAMPLES for module in _MODULES)])


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "what",
        nargs="?",
        default="local",
        metavar="WHAT",
        help=f"{BENCHMARKS} (default: local)",
    )
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
    trace = parser.add_argument_group("bench policies")
    trace.add_argument(
        "--trace",
        type=Path,
        metavar="FILE",
        help="CSV with TIMESTAMP, ContextTokens, GeneratedTokens; gateway, eviction, kv-tiers: Mooncake",
    )
    trace.add_argument("--requests", type=int, metavar="N", help="number of requests (default: 3000; kv-tiers: 64)")
    trace.add_argument("--speed", type=float, default=4.0, metavar="X", help="speed-up of the trace (default: 4)")
    trace.add_argument("--svg", type=Path, metavar="FILE", help="write the plot to this file")
    encode = parser.add_argument_group("bench encode")
    encode.add_argument("--texts", type=int, default=1000, metavar="N", help="texts to embed (default: 1000)")
    encode.add_argument(
        "--reference",
        default="",
        metavar="PYTHON",
        help="interpreter with sentence-transformers and, for ONNX files, onnxruntime, to compare with",
    )
    encode.add_argument(
        "--beside",
        default="",
        metavar="MODEL",
        help="serve this model too, and measure a stream of it while the texts are embedded",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON line per figure instead of a table")
    bench_peers.add_arguments(parser)
    bench_serve.add_arguments(parser)
    formats.add_arguments(parser)
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
        "local": _bench_server,
        "peers": lambda args: _until_terminated(lambda: bench_peers.run(args)),
        "formats": _bench_formats,
        "plan": _bench_plan,
        "counting": _bench_counting,
        "step": _bench_step,
        "adapter-load": _bench_adapter_load,
        "encode": _bench_encode,
        "front": _bench_front,
        "gateway": lambda args: _until_terminated(lambda: _bench_gateway(args)),
        "observe": bench_observe.run,
        "speculate": bench_speculate.run,
        "smooth": lambda args: _until_terminated(lambda: _bench_smooth(args)),
        "policies": _bench_policies,
        "eviction": _bench_eviction,
        "kv-tiers": _bench_kv_tiers,
        "adapters": _bench_adapters,
        "fetch": _bench_fetch,
        "replay": _bench_replay,
    }
    if args.what not in actions:
        raise UsageError(f"Unknown benchmark '{args.what}'. Benchmarks: {BENCHMARKS}; use --url for a running server.")
    return actions[args.what](args)


def _until_terminated(measure: Callable[[], int]) -> int:
    try:
        return measure()
    except asyncio.CancelledError:
        return EXIT_TERMINATED


def _print_figures(figures: Iterable[Figure], title: str, target: str, *, as_json: bool) -> int:
    """JSON lines as the figures come, or one table at the end."""
    from millrace.bench.figures import print_table

    if as_json:
        for figure in figures:
            print(figure.as_json(target=target), flush=True)
    else:
        print_table(list(figures), title)
    return 0


def _bench_formats(args: argparse.Namespace) -> int:
    title = "Formats of weights: memory, time of a decode step, perplexity"
    return _print_figures(formats.figures(args), title, "formats", as_json=args.json)


def _bench_plan(args: argparse.Namespace) -> int:
    from millrace.bench.micro.plan import plan_figures

    title = "Host time: plan and apply of one steady decode step; first token of a lone request; steps as bytes"
    return _print_figures(plan_figures(), title, "local", as_json=args.json)


def _bench_counting(args: argparse.Namespace) -> int:
    from millrace.bench.micro.counting import counting_figures

    title = "Host time that the engine's figures add to a decode step, in alternating steps"
    return _print_figures(counting_figures(), title, "local", as_json=args.json)


def _bench_step(args: argparse.Namespace) -> int:
    from millrace.bench.micro.step import step_figures

    title = "One CPU step by kind of work, fastest of many"
    return _print_figures(step_figures(load_settings(args).config), title, "step", as_json=args.json)


def _bench_adapters(args: argparse.Namespace) -> int:
    from millrace.bench.micro.adapters import adapter_figures

    configs = [model.config for model in bench_gpu.chosen_models(args)] if args.models else [load_settings(args).config]
    title = "One step with adapters of rank 16 and without, in alternating rounds"
    figures = (figure for config in configs for figure in adapter_figures(config))
    return _print_figures(figures, title, "adapters", as_json=args.json)


def _bench_adapter_load(args: argparse.Namespace) -> int:
    from millrace.bench.micro.adapter_load import adapter_figures
    from millrace.terminal.local_backend import llm_settings

    configs = [model.config for model in bench_gpu.chosen_models(args)] if args.models else [load_settings(args).config]
    figures = (figure for config in configs for figure in adapter_figures(config.model.source, llm_settings(config)))
    return _print_figures(figures, "Many adapters, room for few", "adapter-load", as_json=args.json)


def _bench_encode(args: argparse.Namespace) -> int:
    from millrace.bench.encoding.throughput import encode_figures, shape_figures

    if args.texts < 8:
        raise UsageError(f"--texts is {args.texts}; it must be 8 or more.")
    if args.beside:
        return _bench_encode_beside(args)
    config = load_settings(args).config
    figures: Iterable[Figure] = encode_figures(config, args.texts, args.reference)
    if args.models:
        shapes = [name.strip() for name in args.models.split(",")]
        parts = (shape_figures(config, shape, args.texts, args.reference) for shape in shapes)
        figures = (figure for part in parts for figure in part)
    return _print_figures(
        figures, f"{args.texts} texts of mixed lengths through LLM.embed", "encode", as_json=args.json
    )


def _bench_encode_beside(args: argparse.Namespace) -> int:
    import uvloop

    from millrace.bench.encoding.beside import EncodeBesideBench, verdict
    from millrace.bench.encoding.throughput import mixed_texts
    from millrace.bench.local_server import cancel_on_sigterm

    if args.reference:
        raise UsageError("--reference compares an encoder alone; leave --beside out.")
    config = load_settings(args).config
    target_ms = config.plan.step_ms if config.plan.step_ms > 0 else _SMOOTH_MS
    bench = EncodeBesideBench(
        args.beside,
        config.model.source,
        mixed_texts(args.texts, _BESIDE_WORDS),
        target_ms,
        ("--step-ms", str(target_ms), "--threads", str(config.run.threads)),
        seed=int(time.time()) if args.content_seed is None else args.content_seed,
    )

    async def measure() -> list[Figure]:
        cancel_on_sigterm()
        return await bench.run()

    figures = uvloop.run(measure())
    title = f"{args.texts} texts of up to {_BESIDE_WORDS} words beside a stream of {args.beside}"
    code = _print_figures(figures, title, "encode", as_json=args.json)
    if not args.json:
        print(verdict(figures, target_ms))
    return code


def _bench_front(args: argparse.Namespace) -> int:
    from millrace.bench.micro.front import FrontBench

    source = load_settings(args).config.model.source
    benches = [
        FrontBench(source, fronts, streams, args.tokens, args.seconds or 5.0, args.step_ms, args.clients or 1)
        for fronts in numbers("--fronts", args.fronts or "1")
        for streams in numbers("--streams", args.streams or "64,512")
    ]
    figures = (figure for bench in benches for figure in bench.run().figures())
    return _print_figures(
        figures, f"Fronts over a null engine, {args.tokens} tokens per request", "front", as_json=args.json
    )


def _bench_gateway(args: argparse.Namespace) -> int:
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
        for token_ms in _TOKEN_MS if args.token_ms is None else (args.token_ms,):
            bench = GatewayBench(
                *(args.replicas, streams, args.tokens, args.seconds or 5.0, token_ms),
                *(args.gateways, args.clients or 1, cores),
            )
            figures += uvloop.run(measured(KeysBench(bench, args.rounds or 4) if args.keys else bench))
    if args.keys:
        return _print_figures(figures, "API keys and quotas at a gateway", "gateway", as_json=args.json)
    if args.token_ms is not None:  # Only the gateway is asked about.
        return _print_figures(figures, "A gateway over null replicas", "gateway", as_json=args.json)
    if args.trace is not None:
        traffic = read_trace(args.trace, _POLICY_REPLICAS)
        figures += policy_figures(traffic, TRACE_CACHED_TOKENS, TRACE_PROMPT_TOKENS_PER_S)
    else:
        traffic = conversations(_POLICY_REPLICAS, args.requests or _TRACE_REQUESTS)
        figures += policy_figures(traffic, CACHED_TOKENS, PROMPT_TOKENS_PER_S)
    if args.svg is not None:
        name = args.trace.name if args.trace is not None else "made-up conversations"
        args.svg.write_text(plot(figures, f"{len(traffic)} requests of {name}, {_POLICY_REPLICAS} replicas"))
    return _print_figures(
        figures, "A gateway over null replicas, and policies on one traffic", "gateway", as_json=args.json
    )


def _bench_smooth(args: argparse.Namespace) -> int:
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
        code = max(code, _print_figures(figures, title, "smooth", as_json=args.json))
        if not args.json:
            print("\n".join(verdicts(figures)))
    return code


def _bench_replay(args: argparse.Namespace) -> int:
    from millrace.bench.micro.replay import replay_log

    config = load_settings(args).config
    if not config.plan.step_log:
        raise UsageError("Name the log of the steps to run again: millrace bench replay --step-log FILE.")
    done = replay_log(Path(config.plan.step_log).expanduser(), config.run)
    _print_figures(done.figures(), f"Steps of {config.plan.step_log}", "replay", as_json=args.json)
    return 1 if done.num_different else 0


def _bench_policies(args: argparse.Namespace) -> int:
    from millrace.bench.micro.policies import ReplayResult, compare, plot_svg, policy_figures, read_trace

    if args.trace is None:
        raise UsageError("bench policies needs --trace FILE: a CSV with TIMESTAMP, ContextTokens and GeneratedTokens.")
    num_requests = args.requests or _TRACE_REQUESTS
    arrivals = read_trace(args.trace, num_requests, args.speed)
    results: list[ReplayResult] = []

    def figures() -> Iterable[Figure]:
        for done in compare(arrivals):
            results.append(done)
            yield from policy_figures(done).figures()

    title = f"Policies on {num_requests} requests of {args.trace.name}, {args.speed:g} times as fast"
    code = _print_figures(figures(), title, "policies", as_json=args.json)
    if args.svg is not None:
        args.svg.write_text(plot_svg(results), encoding="utf-8")
    return code


def _bench_eviction(args: argparse.Namespace) -> int:
    from millrace.bench.micro.eviction import eviction_figures

    if args.trace is None:
        raise UsageError("bench eviction needs --trace FILE: JSON lines with hash_ids, as in the Mooncake traces.")
    title = f"Policies of eviction on {args.trace.name}: share of the prompt tokens found"
    figures = eviction_figures(args.trace)
    return _print_figures(figures, title, "eviction", as_json=args.json)


def _bench_kv_tiers(args: argparse.Namespace) -> int:
    from millrace.bench.kv_tiers import HOST_GIB, POOL_TOKENS, KvTiersBench
    from millrace.bench.micro.tiers import tier_figures

    if args.trace is not None:
        title = f"Write policies of the disk on {args.trace.name}: share of the prompt tokens found"
        return _print_figures(tier_figures(args.trace, args.svg), title, "kv-tiers", as_json=args.json)
    count = _TIER_REQUESTS if args.requests is None else args.requests
    if count < 1:
        raise UsageError(f"--requests is {count}; it must be 1 or more.")
    loaded = load_settings(args)
    memory = loaded.config.memory
    if memory.kv_disk or memory.kv_gib:
        raise UsageError("bench kv-tiers has a directory of its own, and sizes by --kv-tokens and --kv-host-gib only.")
    line = StatusLine()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "settings.toml"
        file.write_text("\n".join(toml_lines(loaded)), encoding="utf-8")
        sizes = memory.kv_tokens or POOL_TOKENS, memory.kv_host_gib or HOST_GIB
        bench = KvTiersBench(("--config", str(file)), count, *sizes)
        figures = list(bench.run(line.show, args.svg))
    line.clear()
    title = f"A working set of four times the KV pool, {count} requests"
    return _print_figures(figures, title, "kv-tiers", as_json=args.json)


def _bench_fetch(args: argparse.Namespace) -> int:
    from millrace.bench.gateway.fetch import run

    figures = run((load_settings(args).config.model.source, "--threads", "1"), args.tokens, args.rounds or 4)
    return _print_figures(figures, "A prompt that another replica has", "fetch", as_json=args.json)


def _bench_server(args: argparse.Namespace) -> int:
    import uvloop

    loaded = load_settings(args)
    if not args.time_limit > 0:
        raise UsageError(f"--time-limit is {args.time_limit:g}; it must be greater than 0.")
    settings = "\n".join(toml_lines(loaded))
    source = loaded.config.model.source if loaded.sources["model.source"] != "default" else ""
    # The clients share the cores with the server; on uvloop they take half as much CPU.
    return _until_terminated(lambda: uvloop.run(_measure(args, settings, source)))


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
