"""The model while an adapter is trained: frozen linears, with low-rank matrices beside those that are targets."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from millrace.errors import ModelError
from millrace.models.drafters.modules import DraftModule, can_train
from millrace.models.spec.model_spec import ModelSpec
from millrace.models.spec.rope import inverse_frequencies
from millrace.models.weights.source import WeightSource
from millrace.training.lora.options import AdapterOptions

Read = Callable[[], Tensor]


class _FrozenProduct(torch.autograd.Function):
    """x Wᵀ. W is asked for again in the backward pass, so that a dequantised one is not kept in between."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: Tensor, read: Read) -> Tensor:
        ctx.read = read  # type: ignore[attr-defined]
        return F.linear(x, read().to(x.dtype))

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, *gradients: Tensor) -> tuple[Tensor, None]:
        weight: Tensor = ctx.read()  # type: ignore[attr-defined]
        return gradients[0] @ weight.to(gradients[0].dtype), None


class FrozenLinear(nn.Module):
    def __init__(self, read: Read, bias: Tensor | None) -> None:
        super().__init__()
        self._read, self._bias = read, bias

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = _FrozenProduct.apply(x, self._read)  # type: ignore[no-untyped-call]
        return out if self._bias is None else out + self._bias


class LoraMatrices(nn.Module):
    def __init__(self, inputs: int, outputs: int, rank: int) -> None:
        super().__init__()
        self.lora_A = nn.Parameter(torch.empty(rank, inputs))
        self.lora_B = nn.Parameter(torch.zeros(outputs, rank))
        nn.init.kaiming_uniform_(self.lora_A, a=math.sqrt(5))


class AdaptedLinear(nn.Module):
    def __init__(self, base: FrozenLinear, matrices: LoraMatrices, scale: float, dropout: float) -> None:
        super().__init__()
        self.base, self.matrices, self._scale, self._dropout = base, matrices, scale, dropout

    def forward(self, x: Tensor) -> Tensor:
        own = F.dropout(x, self._dropout, self.training and self._dropout > 0)
        added = F.linear(F.linear(own, self.matrices.lora_A), self.matrices.lora_B)
        out: Tensor = self.base(x) + added * self._scale
        return out


def adapted_model(
    spec: ModelSpec, weights: WeightSource, options: AdapterOptions, device: torch.device, *, keeps: bool
) -> tuple[DraftModule, dict[str, LoraMatrices]]:
    """The model, and its new matrices by module name. `keeps` False: each weight is read, and dequantised, whenever it
    is multiplied (QLoRA's bargain: time for memory)."""
    if not can_train(spec):
        raise ModelError(
            f"Adapters of {spec.family} models cannot be trained here; Llama-like models are supported. Train it with"
            " PEFT: `millrace serve --adapters` reads what PEFT writes."
        )
    torch.manual_seed(options.seed)
    with torch.device("meta"):
        model = DraftModule(spec)
    model.inverse_frequencies = inverse_frequencies(spec.ropes[0]).to(device)
    matrices = {}

    def read(name: str) -> Tensor:
        return weights.get(name, device=device, dtype=torch.float32)

    for name, module in list(model.named_modules()):
        if not isinstance(module, nn.Linear):
            continue
        if name == "lm_head":  # The loss multiplies its matrix itself.
            continue
        bias = read(f"{name}.bias") if module.bias is not None else None
        frozen = FrozenLinear(_reader(weights, f"{name}.weight", device, keeps=keeps), bias)
        parent, _, last = name.rpartition(".")
        if last in options.targets:
            own = matrices[name] = LoraMatrices(module.in_features, module.out_features, options.rank).to(device)
            setattr(model.get_submodule(parent), last, AdaptedLinear(frozen, own, options.scale, options.dropout))
        else:
            setattr(model.get_submodule(parent), last, frozen)
    for name, parameter in list(model.named_parameters()):
        if parameter.is_meta:
            parent, _, last = name.rpartition(".")
            setattr(model.get_submodule(parent), last, nn.Parameter(read(name), requires_grad=False))
    return model, matrices


def _reader(weights: WeightSource, name: str, device: torch.device, *, keeps: bool) -> Read:
    if keeps:
        kept = weights.get(name, device=device, dtype=torch.float32)
        return lambda: kept
    return lambda: weights.get(name, device=device, dtype=torch.float32)
