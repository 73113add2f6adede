"""Builds the engine of an encoder: weights, a planner without a KV cache, and the runner of packed texts."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable

import torch

from millrace.config import Config
from millrace.engine.figures.step_figures import ModelWork
from millrace.engine.fingerprint import weights_digest
from millrace.engine.loop import Engine
from millrace.engine.parts import EngineParts
from millrace.errors import ConfigError, MemoryPlanError
from millrace.host.background import run_in_background
from millrace.link.channel import EngineChannel
from millrace.link.messages import EngineReady
from millrace.models.encoders.load import LoadedEncoder, load_encoder
from millrace.plan.encoding.planner import EncodePlanner, EncodeSettings
from millrace.run.device.device import Device, open_device
from millrace.run.device.precision import encodes_in_int8
from millrace.run.encoder_runner import EncoderRunner
from millrace.run.graphs.encoder_graphs import EncoderGraphs
from millrace.sources.resolve import ModelFiles
from millrace.version import __version__

MAX_ROWS = 512
"""Texts in flight together. More would not make a step larger: a text has at least one token."""


def build_encoder_engine(
    config: Config, files: ModelFiles, channel: EngineChannel, on_loading: Callable[[str, int, int], None]
) -> tuple[Engine, EngineReady]:
    _refuse_settings(config)
    device = open_device(config.run)
    if device.defaults.shares_cores and not config.server.in_process:
        run_in_background()  # Streams of other models of the server keep their pace beside a large batch.
    dtype = _dtype(config, device)
    int8 = encodes_in_int8(config.model, device, dtype)
    weights_bytes = sum(path.stat().st_size for path in files.weights)
    free_bytes = device.free_bytes()
    if weights_bytes > free_bytes:
        raise MemoryPlanError(f"The weights take {weights_bytes:,} bytes; {free_bytes:,} are free. Free memory first.")
    on_loading("weights", 0, weights_bytes)
    model = load_encoder(files, device=device.torch_device, dtype=dtype, int8=int8)
    on_loading("weights", weights_bytes, weights_bytes)
    max_tokens = min(model.files.max_tokens, config.model.max_context or model.files.max_tokens)
    budget = config.plan.token_budget or device.defaults.encode_budget
    settings = EncodeSettings(
        max_rows=config.plan.max_running or MAX_ROWS,
        token_budget=budget,
        max_tokens=max_tokens,
        aging_s=config.plan.aging_s,
    )
    graphs = None
    if config.run.graphs and model.encoder.packs:
        graphs = EncoderGraphs(model.encoder, device, max_tokens=budget, max_texts=settings.max_rows)
    runner = EncoderRunner(model, device, graphs)
    engine = Engine(
        EncodePlanner(settings),
        runner,
        device,
        channel,
        facts=runner.facts,
        parts=EngineParts(work=_work(model, weights_bytes), has_figures=config.observe.figures),
    )
    return engine, _ready(config, files, model, device, settings, dtype, weights_bytes)


def _refuse_settings(config: Config) -> None:
    """Settings that ask for something that an encoder does not have."""
    if config.plan.step_log:
        raise ConfigError("--step-log records steps of models that write text; an encoder has none.", param="step_log")
    if config.model.quantization not in ("auto", "none", "int8"):
        message = f"--quantization is {config.model.quantization}; encoders have none and int8 (on a CPU) only."
        raise ConfigError(message, param="quantization")


def _dtype(config: Config, device: Device) -> torch.dtype:
    named = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
    return named.get(config.model.dtype, device.defaults.encode_dtype)


def _work(model: LoadedEncoder, weights_bytes: int) -> ModelWork:
    spec = model.encoder.spec
    layers = spec.num_parameters - spec.vocab_size * spec.hidden_size
    # Each token attends to all of its text, while `pair_flops` counts those before it: twice as many.
    return ModelWork(weights_bytes, token_flops=2.0 * layers, pair_flops=8.0 * spec.hidden_size * spec.num_layers)


def _ready(
    config: Config,
    files: ModelFiles,
    model: LoadedEncoder,
    device: Device,
    settings: EncodeSettings,
    dtype: torch.dtype,
    weights_bytes: int,
) -> EngineReady:
    spec, dtype_name = model.encoder.spec, str(dtype).removeprefix("torch.")
    widest = max(3 * spec.hidden_size, spec.intermediate_size * (2 if spec.is_gated else 1))
    measured = device.measured_limits(dtype)
    identity = [__version__, torch.__version__, dtype_name, device.name(), weights_digest(files.weights)]
    if config.model.quantization == "int8":
        identity.append("int8")
    identity.append(json.dumps(files.config, sort_keys=True, default=str))
    return EngineReady(
        model_name=config.model.served_name or files.name,
        max_context=settings.max_tokens,
        vocab_size=spec.vocab_size,
        kv_tokens=settings.max_tokens,
        block_size=1,
        dtype=dtype_name,
        device=device.name(),
        memory_plan={
            "weights": weights_bytes,
            "activations, worst step": (
                device.defaults.num_activations * 4 * settings.token_budget * widest * dtype.itemsize
            ),
        },
        num_parameters=spec.num_parameters,
        fingerprint="mr-" + hashlib.sha256("\n".join(identity).encode()).hexdigest()[:12],
        device_bytes_per_s=measured.bytes_per_s,
        device_flops=measured.flops,
        notes=_ignored(config),
    )


def _ignored(config: Config) -> tuple[str, ...]:
    """A server may have models with a KV cache beside this one, so these settings are no error."""
    memory = config.memory
    given = {"--kv-host-gib": memory.kv_host_gib, "--kv-disk": memory.kv_disk}
    return tuple(f"{name} is ignored: an encoder has no KV cache." for name, value in given.items() if value)
