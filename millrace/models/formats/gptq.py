"""GPTQ checkpoints (`quant_method: gptq`): 4- or 8-bit codes with a scale and a zero point per group of inputs.

`qweight` int32 [K bits / 32, N]: consecutive inputs of one output per word; `qzeros` int32 [groups, N bits / 32];
`scales` [groups, N]; `g_idx` int32 [K]: the group of each input. With act-order the groups are not consecutive. The
older format stores words of zero points minus one in each field, `gptq_v2` the words themselves.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch

from millrace.models.formats.base import (
    QuantisedMatrix,
    Settings,
    StoredTensors,
    check_shape,
    gguf_of,
    items,
    pack_codes,
    unpack_words,
    unsupported,
)
from millrace.ops.linear.grouped_weight import GroupedWeight

_ONES: Final = {4: 0x11111111, 8: 0x01010101}
"""By bits: a word with 1 in every field."""


@dataclass(frozen=True, slots=True)
class _Rule:
    """How a module is quantised."""

    bits: int
    group: int
    is_symmetric: bool
    is_v2: bool

    def changed(self, settings: Mapping[str, Any]) -> _Rule:
        own = _Rule(
            int(settings.get("bits", self.bits)),
            int(settings.get("group_size", self.group)),
            bool(settings.get("sym", self.is_symmetric)),
            self.is_v2,
        )
        if own.bits not in (4, 8):
            raise unsupported(f"GPTQ with {own.bits} bits", "Use one with 4 or 8 bits.")
        return own


class GptqFormat:
    def __init__(self, settings: Settings, tensors: StoredTensors) -> None:
        layout = str(settings.get("checkpoint_format") or "gptq")
        if layout not in ("gptq", "gptq_v2"):
            raise unsupported(f"GPTQ in the layout {layout}", "Use a checkpoint in the layout gptq or gptq_v2.")
        self._tensors, self._names = tensors, frozenset(tensors.names())
        self._rule = _Rule(4, 128, True, layout == "gptq_v2").changed(settings)
        self._dynamic: Mapping[str, Any] = settings.get("dynamic") or {}

    def matrix(self, module: str, shape: tuple[int, int]) -> QuantisedMatrix | None:
        qweight, qzeros, scales, g_idx = (f"{module}.{end}" for end in ("qweight", "qzeros", "scales", "g_idx"))
        if qweight not in self._names:
            return None
        rule, (outputs, inputs) = self._rule_of(module), shape
        group = rule.group if rule.group > 0 else inputs
        groups = -(-inputs // group)
        check_shape(self._tensors, qweight, (inputs * rule.bits // 32, outputs))
        check_shape(self._tensors, scales, (groups, outputs))
        used = (qweight, scales, *(name for name in (qzeros, g_idx) if name in self._names))
        has_zeros = not rule.is_symmetric and qzeros in self._names
        order = self._order(g_idx, group)
        return QuantisedMatrix(
            label=f"GPTQ {rule.bits}-bit, groups of {group}" + ("" if order is None else ", act-order"),
            shape=shape,
            tensors=used,
            num_bytes=items(shape) * rule.bits // 8
            + groups * outputs * (self._tensors.dtype(scales).itemsize + has_zeros),
            read=partial(self._read, module, rule, has_zeros, group, order),
            gguf=gguf_of(rule.bits, group, inputs, zero=1 << (rule.bits - 1), has_zeros=has_zeros),
            has_order=order is not None,
        )

    def _rule_of(self, module: str) -> _Rule:
        """`dynamic`: patterns of module names with settings that differ; `+:` before a pattern means the same."""
        for pattern, settings in self._dynamic.items():
            if re.match(pattern.removeprefix("+:"), module):
                return self._rule.changed(settings) if settings else self._rule
        return self._rule

    def _order(self, g_idx: str, group: int) -> torch.Tensor | None:
        return None if g_idx not in self._names else order_of_groups(self._tensors.raw(g_idx), group)

    def _read(
        self, module: str, rule: _Rule, has_zeros: bool, group: int, order: torch.Tensor | None, dtype: torch.dtype
    ) -> GroupedWeight:
        words = self._tensors.raw(f"{module}.qweight")
        codes = unpack_words(words.t(), rule.bits)
        zeros = None
        if has_zeros:
            packed = self._tensors.raw(f"{module}.qzeros")
            # One was subtracted from every field of a word at once: a field of 0 borrowed from the next one.
            packed = packed if rule.is_v2 else packed + _ONES[rule.bits]
            zeros = unpack_words(packed, rule.bits).t().contiguous()
        return GroupedWeight(
            codes=pack_codes(codes if order is None else codes[:, order], rule.bits),
            scales=self._tensors.raw(f"{module}.scales").t().contiguous(),
            in_features=codes.shape[1],
            group=group,
            dtype=dtype,
            zero=1 << (rule.bits - 1),
            zeros=zeros,
            order=order,
        )


def order_of_groups(groups: torch.Tensor, group: int) -> torch.Tensor | None:
    """The inputs sorted by group, int64 [K]; None if they are sorted already. Groups must have the same size."""
    groups = groups.long()
    expected = torch.arange(len(groups)) // group
    if groups.equal(expected) or not bool(groups.any()):
        return None
    order = torch.argsort(groups, stable=True)
    if not groups[order].equal(expected):
        raise unsupported(f"act-order whose groups do not all have {group} inputs", "Quantise the model again.")
    return order
