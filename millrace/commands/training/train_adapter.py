"""`millrace train-adapter`: trains a LoRA adapter of a model and writes it as PEFT does."""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from millrace.terminal.parser import UsageError
from millrace.terminal.settings_options import LOCAL_MODEL_SETTINGS, add_model, add_settings, load_settings
from millrace.training.arguments import add_output, add_training, check_training, training_values

if TYPE_CHECKING:
    from millrace.training.lora.options import AdapterOptions

USAGE = "millrace train-adapter [MODEL] --data FILE --output DIR [options]"
EXAMPLES = """\
FILE has one JSON object per line: messages whose last is the assistant's, or a prompt (prompt, instruction with input,
question) and its answer (completion, response, answer, output), or text. Only answers are learned, and all of a text.

Weights of a quantised MODEL (GGUF and others) stay quantised and are dequantised whenever they are multiplied, as in
QLoRA. DIR gets adapter_model.safetensors and adapter_config.json, which PEFT reads too, README.md and curves.svg, and
while it trains checkpoint.pt, from which --resume continues.

examples:
  millrace train-adapter --data pirate.jsonl --output pirate
  millrace train-adapter ./my-model --data legal.jsonl --rank 8 --targets q_proj,v_proj --minutes 5 --output legal
  millrace train-adapter --data pirate.jsonl --output pirate --resume
  millrace serve --adapters pirate=./pirate"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    parser.add_argument("--data", metavar="FILE", type=Path, required=True, help="examples, one per line; see below")
    add_output(parser)
    lora = parser.add_argument_group("adapter")
    lora.add_argument("--rank", metavar="N", type=int, default=16, help="rank of the matrices (default: 16)")
    lora.add_argument("--alpha", metavar="X", type=float, default=32.0, help="scale times rank (default: 32)")
    lora.add_argument("--dropout", metavar="X", type=float, default=0.0, help="of inputs of the matrices (default: 0)")
    lora.add_argument("--rslora", action="store_true", help="scale by alpha / sqrt(rank)")
    lora.add_argument("--targets", metavar="NAMES", help="linears to adapt, with commas (default: all of a layer)")
    training = parser.add_argument_group("training")
    training.add_argument(
        "--max-tokens", metavar="N", type=int, default=1024, help="leave out longer examples (default: 1024)"
    )
    add_training(training, passes_over="data", epochs=3.0, rate=2e-4, rate_help="0.0002", save_every=100)
    add_settings(parser, sections=("model", "run"), taken=("seed",), shown=LOCAL_MODEL_SETTINGS)


def run(args: argparse.Namespace) -> int:
    options = _options(args)
    config = load_settings(args).config

    from millrace.terminal.model_download import obtain_model
    from millrace.training.bar import TrainingBar
    from millrace.training.lora.train import train_adapter

    obtain_model(config.model.source, offline=config.model.offline)
    with TrainingBar() as bar:
        report = train_adapter(options, config, shlex.join(["millrace", *sys.argv[1:]]), bar)
    print(
        f"{report.text()}\n"
        f"Use it: millrace serve {config.model.source} --adapters {options.output.name}={options.output}"
    )
    return 0


def _options(args: argparse.Namespace) -> AdapterOptions:
    from millrace.training.lora.options import TARGETS, AdapterOptions

    check_training(args, counts=("max_tokens",), positive=("learning_rate", "alpha"))
    if not 1 <= args.rank <= 256:
        raise UsageError(f"--rank is {args.rank}; it must be from 1 to 256.")
    if not 0 <= args.dropout < 1:
        raise UsageError(f"--dropout is {args.dropout}; it must be from 0 to below 1.")
    targets = tuple(args.targets.split(",")) if args.targets else TARGETS
    if unknown := set(targets) - set(TARGETS):
        raise UsageError(f"--targets has {sorted(unknown)[0]!r}; it may have {', '.join(TARGETS)}.")
    return AdapterOptions(
        **training_values(args),
        data=args.data,
        rank=args.rank,
        alpha=args.alpha,
        dropout=args.dropout,
        targets=targets,
        uses_rslora=args.rslora,
        max_tokens=args.max_tokens,
    )
