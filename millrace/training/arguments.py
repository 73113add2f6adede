"""Options that all training commands have, and their checks."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from millrace.terminal.parser import UsageError


def add_output(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--output", metavar="DIR", type=Path, required=True, help="directory to write")
    parser.add_argument("--resume", action="store_true", help="continue the training in DIR, with the same options")


def add_training(
    group: argparse._ArgumentGroup, *, passes_over: str, epochs: float, rate: float, rate_help: str, save_every: int
) -> None:
    group.add_argument(
        "--epochs",
        metavar="X",
        type=float,
        default=epochs,
        help=f"passes over the {passes_over} (default: {epochs:g})",
    )
    group.add_argument(
        "--minutes", metavar="X", type=float, default=0.0, help="train for at most X minutes (default: 0 = no limit)"
    )
    group.add_argument(
        "--batch-tokens",
        metavar="N",
        type=int,
        default=0,
        help="tokens per optimiser step; bounds memory (default: 2048 on a CPU, 16384 on a GPU)",
    )
    group.add_argument(
        "--learning-rate", metavar="X", type=float, default=rate, help=f"highest learning rate (default: {rate_help})"
    )
    group.add_argument(
        "--save-every",
        metavar="N",
        type=int,
        default=save_every,
        help=f"steps between checkpoints (default: {save_every})",
    )
    group.add_argument("--seed", metavar="N", type=int, default=0, help="seed of order and weights (default: 0)")


def training_values(args: argparse.Namespace) -> dict[str, Any]:
    """The fields of `LoopOptions` that are options."""
    fields = ("output", "resume", "epochs", "minutes", "batch_tokens", "learning_rate", "save_every", "seed")
    return {name: getattr(args, name) for name in fields}


def check_training(
    args: argparse.Namespace,
    *,
    counts: Sequence[str] = (),
    not_negative: Sequence[str] = (),
    positive: Sequence[str] = (),
) -> None:
    """Besides the common options: whole numbers from 1, numbers from 0, numbers above 0."""
    wanted = {
        **dict.fromkeys((*counts, "save_every"), (1.0, "at least 1")),
        **dict.fromkeys((*not_negative, "minutes", "batch_tokens"), (0.0, "0 or more")),
        **dict.fromkeys((*positive, "epochs"), (sys.float_info.min, "above 0")),
    }
    for name, (least, words) in wanted.items():
        if not (value := getattr(args, name)) >= least:
            raise UsageError(f"--{name.replace('_', '-')} is {value}; it must be {words}.")
    if args.output.is_file():
        raise UsageError(f"--output {args.output} is a file; give a directory.")
    if args.data is not None and not args.data.is_file():
        raise UsageError(f"There is no file {args.data}. Check --data.")
