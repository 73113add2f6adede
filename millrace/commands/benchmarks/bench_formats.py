"""`millrace bench formats`: models in several formats beside each other."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from millrace.commands.benchmarks.printing import print_figures
from millrace.terminal.parser import UsageError, numbers
from millrace.terminal.settings_options import load_settings

if TYPE_CHECKING:
    from millrace.bench.figures import Figure

EXAMPLES = """\
bench formats:
  millrace bench formats --models smollm2-135m-instruct,./my-awq,./my-fp8      each format: GiB, ms of a decode step by
                                                          batch, perplexity; --batches 1,16,64 --text wiki.txt.gz
  millrace bench formats --models llama-3.1-8b --formats plain,awq,fp8,Q4_K   random weights of a shape, offline"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("bench formats")
    group.add_argument(
        "--text", type=Path, metavar="FILE", help="text to score, perhaps a .gz (default: the text of `bench`)"
    )
    group.add_argument(
        "--formats",
        default="",
        metavar="NAMES",
        help="give --models, which are then shapes as in bench gpu, random weights in each of these formats: plain,"
        " awq, gptq, fp8, fp8-block, int8, mxfp4, or one of GGUF's such as Q4_K",
    )
    group.add_argument(
        "--windows", type=int, default=0, metavar="N", help="score only so many windows of 512 tokens (default: all)"
    )


def figures(args: argparse.Namespace) -> Iterator[Figure]:
    from millrace.bench.micro.formats import FormatRun, format_figures

    if args.windows < 0:
        raise UsageError(f"--windows is {args.windows}; it must be 0 or more.")
    config = load_settings(args).config
    names, formats = _names(args.models), _names(args.formats)
    _check_formats(formats, names)
    run = FormatRun(
        models=names or (config.model.source,),
        batches=tuple(numbers("--batches", args.batches or "1,16,64")),
        text=args.text,
        formats=formats,
        windows=args.windows,
    )
    model = config.model
    return format_figures(
        run,
        device=config.run.device,
        threads=config.run.threads,
        dtype=model.dtype,
        quantization=model.quantization,
        max_context=model.max_context,
        kv_gib=config.memory.kv_gib,
    )


def _names(text: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))


def _check_formats(formats: tuple[str, ...], models: tuple[str, ...]) -> None:
    from millrace.bench.micro.formats import PLAIN
    from millrace.models.weights.random_formats import FORMATS

    known = (PLAIN, *FORMATS)
    unknown = [name for name in formats if name not in known]
    if unknown:
        raise UsageError(f"--formats has {', '.join(unknown)}; it takes {', '.join(known)}.")
    if formats and not models:
        raise UsageError("--formats needs a shape, such as --models llama-3.1-8b.")


def run(args: argparse.Namespace) -> int:
    title = "Formats of weights: memory, time of a decode step, perplexity"
    return print_figures(figures(args), title, "formats", as_json=args.json)
