"""Ops with a recurrent state: each version against the reference, and the reference against plain definitions."""

from __future__ import annotations

import pytest
import torch
from helpers.triton_mode import device, interpreted

from millrace.ops.base.state_rows import StateRows
from millrace.ops.cpp.native import native_missing
from millrace.ops.recurrent import conv, recurrence
from millrace.ops.triton.recurrent.conv import causal_conv as triton_conv
from millrace.ops.triton.recurrent.recurrence import recurrence as triton_recurrence

COUNTS, STARTS, TABLE_ROWS = [1, 5, 0, 2], [4, 0, 3, 9], [3, 0, 5, 1]
NUM_TABLE_ROWS = 8
PLACES = [1, 3, 4]


def rows_of(counts: list[int], starts: list[int], table_rows: list[int]) -> StateRows:
    first = torch.tensor([0, *counts]).cumsum(0)
    columns = (first, torch.tensor(starts), torch.tensor(table_rows))
    return StateRows(*(column.to(torch.int32).to(device) for column in columns))


def values(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape) + shape[0])).to(dtype).to(device)


def versions(native: object, triton: object) -> list[object]:
    return [triton] if not interpreted or native_missing(torch.device("cpu")) else [triton, native]


@pytest.mark.parametrize("places", PLACES)
@pytest.mark.parametrize(
    ("dtype", "has_bias", "has_silu"),
    [(torch.float32, True, True), (torch.bfloat16, False, True), (torch.float32, True, False)],
)
def test_conv(places: int, dtype: torch.dtype, has_bias: bool, has_silu: bool) -> None:
    channels, width, rows = 70, 4, rows_of(COUNTS, STARTS, TABLE_ROWS)
    x, states = values(sum(COUNTS), channels, dtype=dtype), values(NUM_TABLE_ROWS, places, channels, 3, dtype=dtype)
    weight, bias = values(channels, width), values(channels) if has_bias else None
    expected_states = states.clone()
    expected = conv.causal_conv(x, weight, bias, expected_states, rows, has_silu)
    for version in versions(conv.native_conv, triton_conv):
        own = states.clone()
        out = version(x, weight, bias, own, rows, has_silu)
        torch.testing.assert_close(out, expected, atol=1e-5 if dtype == torch.float32 else 2e-2, rtol=1e-2)
        assert torch.equal(own, expected_states), version


@pytest.mark.parametrize("places", PLACES)
@pytest.mark.parametrize(
    ("has_delta", "groups", "heads", "keys", "size"), [(True, 2, 4, 16, 16), (False, 1, 3, 20, 37)]
)
def test_recurrence(places: int, has_delta: bool, groups: int, heads: int, keys: int, size: int) -> None:
    total, rows = sum(COUNTS), rows_of(COUNTS, STARTS, TABLE_ROWS)
    q, v = values(total, groups, keys), values(total, heads, size)
    k = torch.nn.functional.normalize(values(total + 1, groups, keys)[1:], dim=-1)
    decay, beta = torch.sigmoid(values(total, heads)), torch.sigmoid(values(total, heads)) if has_delta else None
    states = values(NUM_TABLE_ROWS, places, heads, keys, size)
    expected_states = states.clone()
    expected = recurrence.recurrence(q, k, v, decay, beta, expected_states, rows)
    for version in versions(recurrence.native_recurrence, triton_recurrence):
        own = states.clone()
        out = version(q, k, v, decay, beta, own, rows)
        torch.testing.assert_close(out, expected, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(own, expected_states, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("places", PLACES)
def test_a_prompt_in_parts_gives_the_same_bits(places: int) -> None:
    """Also where a step left more tokens than were accepted: the next one begins at an earlier place."""
    run = recurrence.native_recurrence if not native_missing(torch.device("cpu")) else recurrence.recurrence
    run_conv = conv.native_conv if not native_missing(torch.device("cpu")) else conv.causal_conv
    q, k, v = (values(11, 2, 16).cpu(), values(12, 2, 16).cpu()[1:] / 4, values(13, 4, 8).cpu()[2:])
    decay, beta, x = torch.rand(11, 4), torch.rand(11, 4), values(11, 6).cpu()
    weight = values(6, 4).cpu()

    def in_parts(parts: list[tuple[int, int]]) -> list[torch.Tensor]:
        states, inputs = torch.zeros(1, places, 4, 16, 8), torch.zeros(1, places, 6, 3)
        out = []
        for start, end in parts:
            columns = (torch.tensor([0, end - start]), torch.tensor([start]), torch.tensor([0]))
            rows = StateRows(*(column.to(torch.int32) for column in columns))
            own = [one[start:end].contiguous() for one in (q, k, v, decay, beta, x)]
            out.append((run(*own[:5], states, rows), run_conv(own[5], weight, None, inputs, rows)))
        return [torch.cat(columns) for columns in zip(*out, strict=True)]

    whole = in_parts([(0, 11)])
    for one, other in zip(in_parts([(0, 4), (4, 5), (5, 11)]), whole, strict=True):
        assert torch.equal(one, other)
    if places > 1:  # Of the tokens 5 and 6 only the first is accepted, so the next step computes the second again.
        drafted = in_parts([(0, 5), (5, 7), (6, 11)])
        for one, other in zip(drafted, whole, strict=True):
            assert torch.equal(torch.cat([one[:6], one[7:]]), other)
