"""`millrace merge`: adds a LoRA adapter to its model's weights and writes a directory that needs no adapter."""

from __future__ import annotations

import argparse
from pathlib import Path

from millrace.terminal.parser import UsageError
from millrace.terminal.settings_options import LOCAL_MODEL_SETTINGS, add_model, add_settings, load_settings

USAGE = "millrace merge [MODEL] --adapter DIR --output DIR"
EXAMPLES = """\
The model's checkpoint must not be quantised. Weights keep its type; tokenizer and configuration are copied.

examples:
  millrace merge --adapter ./pirate --output ./pirate-model
  millrace serve ./pirate-model"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    parser.add_argument("--adapter", metavar="DIR", type=Path, required=True, help="directory that PEFT has saved")
    parser.add_argument("--output", metavar="DIR", type=Path, required=True, help="directory to write")
    add_settings(parser, sections=("model",), shown=LOCAL_MODEL_SETTINGS)


def run(args: argparse.Namespace) -> int:
    if args.output.is_file():
        raise UsageError(f"--output {args.output} is a file; give a directory.")
    config = load_settings(args).config

    from millrace.terminal.model_download import obtain_model
    from millrace.training.bar import TrainingBar
    from millrace.training.lora.merge import merge

    obtain_model(config.model.source, offline=config.model.offline)
    with TrainingBar() as bar:
        num_bytes = merge(config.model.source, args.adapter, args.output, bar, offline=config.model.offline)
    print(f"{num_bytes / 1e6:.1f} MB in {args.output}\nUse it: millrace serve {args.output}")
    return 0
