"""A weight of small codes with a scale per group of inputs, and what its numbers are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class GroupedWeight:
    """A weight [N, K]: value = level * scale * output scale + offset, where level is `levels[code]` or
    `code - zero`."""

    codes: Tensor
    """4 bits: uint8 [N, K / 2], even inputs in the low halves. 8 bits: uint8, int8 or float8_e4m3fn [N, K]."""
    scales: Tensor
    """[N / rows per scale, K / group], each rounded up, in the dtype in which they are stored."""
    in_features: int
    group: int
    """Inputs per scale."""
    dtype: torch.dtype
    """What dequantised numbers are rounded to: the model's dtype."""
    rows_per_scale: int = 1
    zero: int = 0
    """The code that means zero, if there are no `zeros`."""
    zeros: Tensor | None = None
    """uint8 [N, K / group]"""
    levels: Tensor | None = None
    """float32 [16 or 256]: the value of each code."""
    output_scales: Tensor | None = None
    """float32 [N]"""
    offsets: Tensor | None = None
    """[N, K / group], in the dtype in which they are stored."""
    gguf: str | None = None
    """The GGUF format with the same values, for codes in the order of `order`; None if there is none."""
    order: Tensor | None = None
    """int64 [K]: column i of the codes belongs to input `order[i]` (act-order)."""
    int8_inputs: bool = False
    """The checkpoint was made for inputs rounded to INT8 (W8A8)."""

    @property
    def bits(self) -> int:
        return 4 if self.codes.shape[1] != self.in_features else 8

    @property
    def shape(self) -> tuple[int, int]:
        return self.codes.shape[0], self.in_features

    @property
    def num_bytes(self) -> int:
        """Without `levels` and `order`, a few KiB."""
        parts = (self.codes, self.scales, self.zeros, self.output_scales, self.offsets)
        return sum(part.nbytes for part in parts if part is not None)

    def to(self, device: torch.device) -> GroupedWeight:
        fields = ("codes", "scales", "zeros", "levels", "output_scales", "offsets", "order")
        parts = {name: getattr(self, name) for name in fields}
        return replace(self, **{name: part.to(device) for name, part in parts.items() if part is not None})

    def dequantised(self, first: int = 0, last: int | None = None) -> Tensor:
        """float32 rows first to last, in the order of the inputs. The reference: it defines what the codes mean."""
        rows = slice(first, self.shape[0] if last is None else last)
        codes = self.codes[rows]
        if self.bits == 4:
            codes = torch.stack((codes & 15, codes >> 4), dim=2).flatten(1)
        if self.levels is None:
            levels = codes.float()
        else:  # index_select takes a sixth of the time of an index
            levels = self.levels.index_select(0, codes.flatten().int()).view(codes.shape)
        scales = self.scale_rows(rows)
        if self.output_scales is not None:
            scales = scales * self.output_scales[rows, None]
        for part, groups in self._groups(levels):
            if self.zeros is not None:
                part -= self.zeros[rows, groups, None]
            elif self.zero:
                part -= self.zero
            part *= scales[:, groups, None]
            if self.offsets is not None:
                part += self.offsets[rows, groups, None].float()
        if self.order is None:
            return levels
        return torch.empty_like(levels).index_copy_(1, self.order, levels)

    def scale_rows(self, rows: slice = slice(None)) -> Tensor:
        """float32 [rows, K / group]"""
        if self.rows_per_scale == 1:
            return self.scales[rows].float()
        owners = torch.arange(self.shape[0], device=self.scales.device)[rows] // self.rows_per_scale
        return self.scales.float()[owners]

    def _groups(self, levels: Tensor) -> list[tuple[Tensor, slice]]:
        """Views of whole groups [rows, groups, inputs] and of a shorter last one, each with its groups."""
        rows, size = levels.shape[0], min(self.group, self.in_features)
        num_whole = self.in_features // size
        whole = levels[:, : num_whole * size].view(rows, num_whole, size)
        rest = levels[:, num_whole * size :].view(rows, 1, -1)
        return [(whole, slice(num_whole)), (rest, slice(num_whole, None))][: 1 + (rest.shape[2] > 0)]


def join(weights: Sequence[GroupedWeight]) -> GroupedWeight | tuple[GroupedWeight, ...]:
    """The weights as one, its outputs after each other; as they are if they differ in more than codes and scales."""
    first = weights[0]
    if not all(_fits_after(first, weight) for weight in weights):
        return tuple(weights)
    if len(weights) == 1:
        return first

    def cat(name: str) -> Tensor | None:
        parts = [getattr(weight, name) for weight in weights]
        return None if parts[0] is None else _cat(parts)

    scales, rows_per_scale = cat("scales"), first.rows_per_scale
    if any(weight.shape[0] % rows_per_scale for weight in weights[:-1]):
        scales, rows_per_scale = _cat([weight.scale_rows() for weight in weights]), 1
    assert scales is not None
    codes = cat("codes")
    assert codes is not None
    return replace(
        first,
        codes=codes,
        scales=scales,
        zeros=cat("zeros"),
        output_scales=cat("output_scales"),
        offsets=cat("offsets"),
        rows_per_scale=rows_per_scale,
    )


def _cat(parts: Sequence[Tensor]) -> Tensor:
    """Any dtype of one byte: torch.cat lacks some of them."""
    kind = parts[0].dtype
    if kind.itemsize > 1:
        return torch.cat(list(parts))
    return torch.cat([part.view(torch.uint8) for part in parts]).view(kind)


def _fits_after(first: GroupedWeight, other: GroupedWeight) -> bool:
    scalars, optional = (
        ("in_features", "group", "rows_per_scale", "zero", "int8_inputs"),
        ("zeros", "output_scales", "offsets"),
    )
    same = all(getattr(first, name) == getattr(other, name) for name in scalars)
    tensors = all(getattr(first, name).dtype == getattr(other, name).dtype for name in ("codes", "scales"))
    present = all((getattr(first, name) is None) == (getattr(other, name) is None) for name in optional)
    return same and tensors and present and first.bits == other.bits and _equal_tables(first, other)


def _equal_tables(first: GroupedWeight, other: GroupedWeight) -> bool:
    for mine, others in ((first.levels, other.levels), (first.order, other.order)):
        if (mine is None) != (others is None) or (mine is not None and others is not None and not mine.equal(others)):
            return False
    return True


def without_fp8(weight: GroupedWeight) -> GroupedWeight:
    """The same numbers, with codes and scales that kernels read on GPUs without FP8: a table has the values of FP8
    codes, and scales fit into float16."""
    scales = weight.scales.to(torch.float16) if weight.scales.dtype == torch.float8_e4m3fn else weight.scales
    if weight.codes.dtype != torch.float8_e4m3fn:
        return replace(weight, scales=scales)
    table = torch.arange(256, dtype=torch.uint8, device=weight.codes.device).view(torch.float8_e4m3fn).float()
    # The two codes of NaN occur in no weight.
    levels = torch.nan_to_num(table)
    return replace(weight, codes=weight.codes.view(torch.uint8), levels=levels, scales=scales)
