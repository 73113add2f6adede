"""`millrace train-drafter`: distils a drafter from a model's own answers and writes it to a directory."""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from millrace.terminal.settings_options import LOCAL_MODEL_SETTINGS, add_model, add_settings, load_settings
from millrace.training.arguments import add_output, add_training, check_training, training_values

if TYPE_CHECKING:
    from millrace.training.options import TrainOptions
    from millrace.training.report import TrainReport

USAGE = "millrace train-drafter [MODEL] --kind eagle|medusa|draft --output DIR [--data FILE] [options]"
EXAMPLES = """\
kinds:
  eagle   one decoder layer over the model's hidden states; drafts a chain. The best choice for most models.
  medusa  one small head per drafted place, without attention; cheapest, accepted less often.
  draft   a small decoder made of a few of the model's own layers; needs nothing of the model when it runs.

The model answers the prompts itself, so any prompts like those it will serve are good data; answers in FILE are not
used. FILE has one prompt per line: text, or JSON with messages, prompt, instruction, question, turns or text, and
optionally a workload name that the last table uses. Without FILE a small built-in set is used (chat, code, summaries,
JSON). --self-prompts N lets the model write N prompts of its own, which works for any chat model.

--output gets model.safetensors, config.json, README.md and curves.svg, and while it trains answers.jsonl and
checkpoint.pt, from which --resume continues.

examples:
  millrace train-drafter --kind eagle --self-prompts 4000 --draft-vocabulary 8192 --output drafter
  millrace train-drafter ./my-model --kind medusa --data prompts.jsonl --minutes 10 --output drafter
  millrace train-drafter --kind eagle --output drafter --resume
  millrace serve --speculate eagle --drafter drafter"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    parser.add_argument("--kind", choices=("eagle", "medusa", "draft"), required=True, help="what to train; see below")
    add_output(parser)
    data = parser.add_argument_group("data")
    data.add_argument("--data", metavar="FILE", type=Path, help="prompts, one per line (default: a built-in set)")
    data.add_argument("--prompts", metavar="N", type=int, default=0, help="use at most N prompts (default: all)")
    data.add_argument(
        "--self-prompts", metavar="N", type=int, default=0, help="further prompts that the model writes (default: 0)"
    )
    data.add_argument(
        "--answers-per-prompt",
        metavar="N",
        type=int,
        default=1,
        help="answers to each prompt, the first greedy, the others sampled (default: 1)",
    )
    data.add_argument("--max-tokens", metavar="N", type=int, default=256, help="tokens per answer (default: 256)")
    _add_training(parser)
    add_settings(
        parser,
        sections=("model", "memory", "run"),
        taken=("seed",),
        shown=LOCAL_MODEL_SETTINGS,
    )


def _add_training(parser: argparse.ArgumentParser) -> None:
    training = parser.add_argument_group("training")
    training.add_argument(
        "--draft-vocabulary",
        metavar="N",
        type=int,
        default=0,
        help="let the drafter propose only the N tokens that the model writes most often: a smaller head is read faster"
        " (default: 0 = all)",
    )
    training.add_argument(
        "--depth", metavar="N", type=int, default=4, help="drafts per step to train for; Medusa heads (default: 4)"
    )
    training.add_argument("--layers", metavar="N", type=int, default=4, help="layers of a draft model (default: 4)")
    rate_help = "0.001; draft 0.0003"
    add_training(training, passes_over="answers", epochs=4.0, rate=0.0, rate_help=rate_help, save_every=200)


def run(args: argparse.Namespace) -> int:
    options = _options(args)
    loaded = load_settings(args)

    from millrace.llm import LLM
    from millrace.terminal.local_backend import llm_settings
    from millrace.terminal.model_download import obtain_model
    from millrace.training.bar import TrainingBar
    from millrace.training.train import train_drafter

    config = loaded.config
    obtain_model(config.model.source, offline=config.model.offline)

    def open_llm() -> LLM:
        return LLM(config.model.source, **llm_settings(config))

    with TrainingBar() as bar:
        report = train_drafter(options, config, open_llm, shlex.join(["millrace", *sys.argv[1:]]), bar)
    _print(report, options, config.model.source)
    return 0


def _options(args: argparse.Namespace) -> TrainOptions:
    from millrace.training.options import TrainOptions

    check_training(
        args,
        counts=("answers_per_prompt", "max_tokens", "depth", "layers"),
        not_negative=("prompts", "self_prompts", "draft_vocabulary", "learning_rate"),
    )
    return TrainOptions(
        **training_values(args),
        kind=args.kind,
        data=args.data,
        num_prompts=args.prompts,
        self_prompts=args.self_prompts,
        answers_per_prompt=args.answers_per_prompt,
        max_tokens=args.max_tokens,
        draft_vocabulary=args.draft_vocabulary,
        depth=args.depth,
        num_layers=args.layers,
    )


def _print(report: TrainReport, options: TrainOptions, source: str) -> None:
    from millrace.terminal.table import print_table

    print_table([report.header(), *report.rows()])
    print(
        f"\n{report.file_bytes / 1e6:.1f} MB in {options.output}; a step of the drafter reads {report.cost(1):.1%} of"
        f" what a step of the model reads.\n"
        f"Use it: millrace serve {source} --speculate {options.kind} --drafter {options.output}"
    )
