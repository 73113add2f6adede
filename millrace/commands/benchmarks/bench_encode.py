"""`millrace bench encode`: texts through an encoder, alone or beside a stream of a chat model."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING

from millrace.commands.benchmarks.printing import print_figures
from millrace.terminal.parser import UsageError
from millrace.terminal.settings_options import load_settings

if TYPE_CHECKING:
    from millrace.bench.figures import Figure

BESIDE_WORDS = 24
"""Longest text beside a stream."""
STEP_MS = 200.0
"""Target of a step if none is given."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
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


def run(args: argparse.Namespace) -> int:
    from millrace.bench.encoding.throughput import encode_figures, shape_figures

    if args.texts < 8:
        raise UsageError(f"--texts is {args.texts}; it must be 8 or more.")
    if args.beside:
        return _run_beside(args)
    config = load_settings(args).config
    figures: Iterable[Figure] = encode_figures(config, args.texts, args.reference)
    if args.models:
        shapes = [name.strip() for name in args.models.split(",")]
        parts = (shape_figures(config, shape, args.texts, args.reference) for shape in shapes)
        figures = (figure for part in parts for figure in part)
    return print_figures(figures, f"{args.texts} texts of mixed lengths through LLM.embed", "encode", as_json=args.json)


def _run_beside(args: argparse.Namespace) -> int:
    import uvloop

    from millrace.bench.encoding.beside import EncodeBesideBench, verdict
    from millrace.bench.encoding.throughput import mixed_texts
    from millrace.bench.local_server import cancel_on_sigterm

    if args.reference:
        raise UsageError("--reference compares an encoder alone; leave --beside out.")
    config = load_settings(args).config
    target_ms = config.plan.step_ms if config.plan.step_ms > 0 else STEP_MS
    bench = EncodeBesideBench(
        args.beside,
        config.model.source,
        mixed_texts(args.texts, BESIDE_WORDS),
        target_ms,
        ("--step-ms", str(target_ms), "--threads", str(config.run.threads)),
        seed=int(time.time()) if args.content_seed is None else args.content_seed,
    )

    async def measure() -> list[Figure]:
        cancel_on_sigterm()
        return await bench.run()

    figures = uvloop.run(measure())
    title = f"{args.texts} texts of up to {BESIDE_WORDS} words beside a stream of {args.beside}"
    code = print_figures(figures, title, "encode", as_json=args.json)
    if not args.json:
        print(verdict(figures, target_ms))
    return code
