"""The message that announces an engine to its fronts, and the digests of what its answers depend on."""

from __future__ import annotations

import hashlib
import json

import torch

from millrace.config import Config
from millrace.engine.adapters.store import parse_adapters
from millrace.engine.decisions.decide import Decided
from millrace.engine.fingerprint import weights_digest
from millrace.engine.ranks.check import rank_notes
from millrace.engine.step_target import target_step_s
from millrace.link.messages import EngineReady
from millrace.ops.base.capability import gpu_notes
from millrace.ops.cpp.native import native_notes
from millrace.run.device.device import Device
from millrace.run.device.token_placing import placing_objection
from millrace.run.drafting.drafters import offered_drafters
from millrace.version import __version__


def ready_message(config: Config, decided: Decided, identity: str) -> EngineReady:
    files, spec, device, plan = decided.files, decided.spec, decided.device, decided.plan
    precision, measured = decided.precision, device.measured_limits(decided.precision.dtype)
    return EngineReady(
        model_name=config.model.served_name or files.name,
        max_context=plan.max_context,
        vocab_size=spec.vocab_size,
        kv_tokens=plan.kv_tokens,
        block_size=config.plan.block_size,
        dtype=str(precision.dtype).removeprefix("torch."),
        device=device.name(),
        memory_plan=plan.parts(),
        notes=(*rank_notes(config, device), *plan.notes, *precision.notes, *_device_notes(device)),
        num_parameters=spec.num_parameters,
        step_ms=1e3 * target_step_s(config, device.defaults),
        fingerprint="mr-" + identity[:12],
        drafters=offered_drafters(config.plan.speculate, device.defaults.pads_drafts, decided.drafter_kind),
        device_bytes_per_s=measured.bytes_per_s,
        device_flops=measured.flops,
        adapters=tuple(sorted(parse_adapters(config.adapters.adapters))) if config.adapters.num_slots else None,
        no_documents=_why_documents_stay(config, decided),
    )


def _why_documents_stay(config: Config, decided: Decided) -> str:
    """Why cached documents cannot be used at other positions, as a clause; empty if they can."""
    if not config.plan.prefix_cache:
        return "the engine runs without --prefix-cache"
    return placing_objection(decided.spec, has_drafter=decided.drafter is not None)


def _device_notes(device: Device) -> tuple[str, ...]:
    return (*native_notes(device.torch_device), *gpu_notes(device.torch_device))


def identity_of(config: Config, decided: Decided) -> str:
    """Digest of what answers depend on."""
    identity = [__version__, torch.__version__, decided.device.name(), *model_identity(config, decided)]
    if config.run.tensor_parallel > 1:  # Sums have another order.
        identity.append(f"ranks {config.run.tensor_parallel}")
    return digest(identity)


def model_identity(config: Config, decided: Decided) -> list[str]:
    """What determines the keys and values of a text, up to rounding."""
    files, precision = decided.files, decided.precision
    parts = [str(precision.dtype).removeprefix("torch."), str(config.model.seed), precision.quantization]
    parts += [decided.plan.kv_dtype, json.dumps(files.config, sort_keys=True, default=str)]
    return [*parts, weights_digest(files.weights)]


def digest(parts: list[str]) -> str:
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()
