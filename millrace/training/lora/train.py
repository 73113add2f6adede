"""The stages of a training: examples, the model with its new matrices, optimiser, files."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from millrace.config import Config
from millrace.errors import ConfigError
from millrace.host.free_memory import available_bytes
from millrace.models.load import is_quantised
from millrace.models.spec.families import spec_from_config
from millrace.models.spec.model_spec import ModelSpec
from millrace.models.weights import open_weights
from millrace.run.device.device import open_device
from millrace.sources.resolve import ModelFiles, resolve_model
from millrace.text.chat.template import load_chat_template
from millrace.text.tokenizers.load import load_tokenizer
from millrace.training.loop import CHECKPOINT, Loop
from millrace.training.lora.examples import read_examples
from millrace.training.lora.files import write_adapter, write_card, write_curves
from millrace.training.lora.model import adapted_model
from millrace.training.lora.options import AdapterOptions
from millrace.training.lora.task import AdapterTask
from millrace.training.options import Reporter

MAX_SHARE = 0.25
"""Of the free memory that dequantised weights may take."""
_BATCH_TOKENS = {"cpu": 2048, "cuda": 16_384}


@dataclass(frozen=True, slots=True)
class AdapterReport:
    folder: Path
    base: str
    num_examples: int
    num_parameters: int
    num_steps: int
    train_s: float
    loss_before: float
    """Of held-out examples, in nats per token."""
    loss_after: float
    file_bytes: int

    def text(self) -> str:
        return (
            f"{self.num_examples:,} examples, {self.num_steps:,} steps, {self.train_s:.0f} s; {self.num_parameters:,}"
            f" parameters in {self.file_bytes / 1e6:.1f} MB. Loss on held-out examples: {self.loss_before:.3f} before,"
            f" {self.loss_after:.3f} after (nats per token)."
        )


def train_adapter(options: AdapterOptions, config: Config, command: str, report: Reporter) -> AdapterReport:
    """Train an adapter of the model of `config` and write it to `options.output`."""
    files = resolve_model(config.model.source, offline=config.model.offline)
    folder = options.output
    if (folder / CHECKPOINT).exists() and not options.resume:
        raise ConfigError(
            f"{folder} holds an earlier training. Continue it with --resume, or give another --output.", param="output"
        )
    tokenizer = load_tokenizer(files)
    template = load_chat_template(files, tokenizer, config.model.chat_template)
    examples, num_long = read_examples(
        options.data, tokenizer, template, max_tokens=options.max_tokens, seed=options.seed
    )
    if num_long:
        report.say(f"{num_long} examples are longer than {options.max_tokens} tokens and are left out (--max-tokens).")
    folder.mkdir(parents=True, exist_ok=True)
    device = open_device(config.run)
    weights = open_weights(files, seed=config.model.seed)
    spec = spec_from_config(files.config)
    model, matrices = adapted_model(spec, weights, options, device.torch_device, keeps=keeps_weights(files, spec))
    task = AdapterTask(model, matrices)
    batch_tokens = options.batch_tokens or _BATCH_TOKENS[device.kind]
    known = [one for one in examples if not one.is_held_out]
    held_out = [one for one in examples if one.is_held_out]

    def measured() -> tuple[float, ...]:
        return (task.mean_loss(held_out, batch_tokens, device.torch_device),)

    report.stage("measuring the model as it is", len(held_out))
    before = measured()[0]
    loop = Loop(task, known, options, batch_tokens, device.torch_device, measured)
    began = time.monotonic()
    curves = loop.run(report)
    file_bytes = write_adapter(folder, files.name, matrices, options)
    result = AdapterReport(
        folder,
        files.name,
        len(examples),
        sum(parameter.numel() for parameter in task.module.parameters()),
        loop.progress.step,
        max(loop.progress.elapsed_s, time.monotonic() - began),
        before,
        curves.acceptance[-1][0],
        file_bytes,
    )
    write_curves(folder, curves, f"adapter of {files.name}")
    write_card(folder, files.name, command, result.text())
    return result


def keeps_weights(files: ModelFiles, spec: ModelSpec) -> bool:
    """Whether weights are held as float32; else a quantised model's are dequantised whenever they are multiplied."""
    return not is_quantised(files) or 4 * spec.num_parameters <= MAX_SHARE * available_bytes()
