"""The stages of a training: prompts, answers, vocabulary, optimiser, measurement, files."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable

import torch

from millrace.config import Config
from millrace.errors import ConfigError
from millrace.llm import LLM
from millrace.models.load import load_decoder
from millrace.models.spec.families import spec_from_config
from millrace.models.weights import open_weights
from millrace.run.device.device import open_device
from millrace.sources.resolve import ModelFiles, resolve_model
from millrace.text.tokenizers.load import load_tokenizer
from millrace.training.answers import make_answers
from millrace.training.export import export_drafter
from millrace.training.loop import Loop
from millrace.training.measure import measure, overall
from millrace.training.options import Reporter, TrainOptions
from millrace.training.report import TrainReport, curves_svg, model_card
from millrace.training.target import Target
from millrace.training.tasks.make import check_options, make_task
from millrace.training.tasks.task import Task
from millrace.training.vocabulary import coverage, frequent_tokens

_BATCH_TOKENS = {"cpu": 2048, "cuda": 16_384}
MEASURED_DURING = 24
"""Held-out answers that the acceptance curve is measured on."""


def train_drafter(
    options: TrainOptions, config: Config, open_llm: Callable[[], LLM], command: str, report: Reporter
) -> TrainReport:
    """Train a drafter for the model of `config` and write it to `options.output`. `open_llm` starts the target's
    engine, which is closed again before training."""
    files = resolve_model(config.model.source, offline=config.model.offline)
    check_options(options, spec_from_config(files.config))
    options.output.mkdir(parents=True, exist_ok=True)
    answers = make_answers(options, open_llm, report)
    gc.collect()
    target, batch_tokens = _load_target(options, config, files)
    known = [answer for answer in answers if not answer.is_held_out]
    held_out = [answer for answer in answers if answer.is_held_out and len(answer.token_ids) > answer.num_prompt + 2]
    if not known or not held_out:
        raise ConfigError("The target's answers are too short to train on. Give other prompts with --data.")
    size = target.spec.vocab_size
    ids = frequent_tokens(known, options.draft_vocabulary, size) if options.draft_vocabulary else None
    task = make_task(options, target, ids)

    def rates() -> tuple[float, ...]:
        return overall(measure(task, held_out[:MEASURED_DURING], batch_tokens, target.device)).rates

    loop = Loop(task, known, options, batch_tokens, target.device, rates)
    began = time.monotonic()
    curves = loop.run(report)
    task.module.eval()
    report.stage("measuring", len(held_out))
    found = measure(task, held_out, batch_tokens, target.device)
    report.advance(len(held_out))
    notes = {
        "target": files.name,
        "kind": options.kind,
        "acceptance": {name: [round(rate, 4) for rate in own.rates] for name, own in found.items()},
    }
    file_bytes = export_drafter(options.output, task, ids, files.config, notes)
    if options.kind == "draft":
        (options.output / "tokenizer.json").write_text(load_tokenizer(files).to_json(), encoding="utf-8")
    result = TrainReport(
        task.spec,
        files.name,
        target.decoder.num_bytes,
        _step_bytes(task, target),
        file_bytes,
        found,
        coverage(held_out, ids, size),
        len(known),
        sum(len(answer.token_ids) for answer in known),
        loop.progress.step,
        max(loop.progress.elapsed_s, time.monotonic() - began),
        curves,
    )
    _write_report(options, result, command)
    return result


def _load_target(options: TrainOptions, config: Config, files: ModelFiles) -> tuple[Target, int]:
    """(target, tokens per optimiser step)."""
    device = open_device(config.run)
    dtype = device.defaults.dtype if config.model.dtype == "auto" else getattr(torch, config.model.dtype)
    decoder = load_decoder(files, device=device.torch_device, dtype=dtype, seed=config.model.seed)
    batch_tokens = options.batch_tokens or _BATCH_TOKENS[device.kind]
    return Target(decoder, open_weights(files, seed=config.model.seed)), batch_tokens


def _step_bytes(task: Task, target: Target) -> int:
    """Bytes that a step of the drafter reads when it is loaded in the target's dtype."""
    itemsize = target.decoder.dtype.itemsize
    spec = task.spec
    own = sum(parameter.numel() for parameter in task.module.parameters()) * itemsize
    if spec.kind == "draft":
        is_tied = spec.decoder is not None and spec.decoder.tied_head
        return own - (0 if is_tied else spec.vocab_size * spec.hidden_size * itemsize)
    needs_head = not spec.has_own_head and not spec.has_shared_head
    return own + (spec.vocab_size * spec.hidden_size * itemsize if needs_head else 0)


def _write_report(options: TrainOptions, result: TrainReport, command: str) -> None:
    title = f"{options.kind} drafter for {result.target_name}"
    (options.output / "curves.svg").write_text(curves_svg(result.curves, title), encoding="utf-8")
    (options.output / "README.md").write_text(model_card(result, command), encoding="utf-8")
