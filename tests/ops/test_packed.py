"""bfloat16 packed in twelve bits: which numbers are exact, how others are rounded, and that writing one entry of the
cache changes no other."""

from __future__ import annotations

import pytest
import torch
from helpers.suite import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from millrace.ops.kv.cache import SCALE_WORDS, head_dim_of, packed_parts, read_kv, write_kv
from millrace.ops.kv.packed import can_pack, pack, packed_items, unpack

EXPONENT_AT, LARGEST_EXPONENT = 7, 254
"""bfloat16: position of the exponent's lowest bit, and the largest exponent of a finite number."""
MAX_SPREAD = 15
"""Numbers up to this many powers of two below the largest are exact."""

sizes = st.sampled_from([64, 128, 256])


def vectors_of(top: int, spread: int, shape: tuple[int, ...], seed: int) -> Tensor:
    """Random bfloat16 vectors. The largest exponent of each is `top`; the others are up to `spread` powers of two below
    it. Numbers below bfloat16's range are denormal or zero."""
    draw = torch.Generator().manual_seed(seed)
    exponents = (top - torch.randint(0, spread + 1, shape, generator=draw)).clamp(min=0)
    exponents.scatter_(-1, torch.randint(0, shape[-1], (*shape[:-1], 1), generator=draw), top)
    mantissas = torch.randint(0, 128, shape, generator=draw)
    signs = torch.randint(-1, 1, shape, generator=draw) * 0x8000
    return (signs + (exponents << EXPONENT_AT) + mantissas).to(torch.int16).view(torch.bfloat16)


def exponent_of(numbers: Tensor) -> Tensor:
    return (numbers.view(torch.int16).int() & 0x7FFF) >> EXPONENT_AT


def round_trip(numbers: Tensor) -> Tensor:
    words, scales = pack(numbers)
    assert (words.dtype, scales.dtype) == (torch.int16, torch.float32)
    assert words.shape == (*numbers.shape[:-1], packed_items(numbers.shape[-1]))
    assert scales.shape == numbers.shape[:-1]
    return unpack(words, scales)


def same_bits(found: Tensor, expected: Tensor) -> bool:
    """True if the float32 numbers equal the bfloat16 ones, signs of zero included."""
    return torch.equal(found.view(torch.int32), expected.float().view(torch.int32))


@settings(max_examples=examples(80))
@given(
    top=st.integers(MAX_SPREAD + 1, LARGEST_EXPONENT),
    spread=st.integers(0, MAX_SPREAD),
    head_dim=sizes,
    seed=st.integers(0, 1 << 30),
)
def test_numbers_near_the_largest_are_exact(top: int, spread: int, head_dim: int, seed: int) -> None:
    numbers = vectors_of(top, spread, (5, head_dim), seed)
    assert same_bits(round_trip(numbers), numbers)


@settings(max_examples=examples(80))
@given(
    top=st.integers(MAX_SPREAD + 1, LARGEST_EXPONENT),
    spread=st.integers(MAX_SPREAD + 1, 300),
    head_dim=sizes,
    seed=st.integers(0, 1 << 30),
)
def test_numbers_far_below_the_largest_keep_their_sign(top: int, spread: int, head_dim: int, seed: int) -> None:
    numbers = vectors_of(top, spread, (5, head_dim), seed)
    found = round_trip(numbers)
    kept = exponent_of(numbers) >= top - MAX_SPREAD
    assert same_bits(found[kept], numbers[kept])
    least = torch.tensor(2.0 ** (top - 127 - MAX_SPREAD))
    assert torch.equal(found[~kept], torch.where(numbers[~kept].signbit(), -least, least))


@settings(max_examples=examples(80))
@given(top=st.integers(0, MAX_SPREAD), head_dim=sizes, seed=st.integers(0, 1 << 30))
def test_at_the_end_of_the_range_only_denormal_numbers_are_inexact(top: int, head_dim: int, seed: int) -> None:
    numbers = vectors_of(top, MAX_SPREAD, (5, head_dim), seed)
    found = round_trip(numbers)
    normal = exponent_of(numbers) > 0
    assert same_bits(found[normal], numbers[normal])
    off = (found.double() - numbers.double()).abs()
    assert float(off.max()) <= 2.0**-126
    if top > 0:
        assert torch.equal(found.signbit(), numbers.signbit())


def test_every_number_is_exact_among_numbers_of_its_size() -> None:
    """All normal bfloat16 numbers; a vector holds all numbers of one exponent with both signs."""
    bits = torch.arange(1 << EXPONENT_AT, (LARGEST_EXPONENT + 1) << EXPONENT_AT).view(-1, 128)
    numbers = torch.cat([bits, bits - 0x8000], dim=-1).to(torch.int16).view(torch.bfloat16)
    assert same_bits(round_trip(numbers), numbers)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_zeros_stay_zeros(head_dim: int) -> None:
    numbers = torch.zeros(2, head_dim, dtype=torch.bfloat16)
    numbers[1, ::3] = -0.0
    assert not round_trip(numbers).any()
    assert not pack(numbers)[1].any()


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("place", [0, 47, 48, 63])
def test_nan_and_infinity_affect_only_their_own_vector(poison: float, place: int) -> None:
    numbers = vectors_of(120, MAX_SPREAD, (3, 64), 0)
    numbers[1, place] = poison
    found = round_trip(numbers)
    assert not found[1].isfinite().any()
    assert same_bits(found[::2], numbers[::2])


def test_scales_are_the_largest_powers_of_two() -> None:
    numbers = torch.tensor([[1.0, -1.9921875, 0.5, 0.0], [3.0, -5.0, 7.0, 6.0]]).to(torch.bfloat16)
    words, scales = pack(numbers.repeat(1, 16))
    assert scales.tolist() == [1.0, 4.0]
    assert words.shape == (2, 48)


def test_packing_takes_three_quarters_of_the_words() -> None:
    assert [head_dim for head_dim in range(1, 513) if can_pack(head_dim)] == [64, 128, 256]
    assert [packed_items(head_dim) for head_dim in (64, 128, 256)] == [48, 96, 192]


def empty(num_blocks: int, kv_heads: int, block_size: int, head_dim: int) -> Tensor:
    """An empty cache; every bit is set, which is NaN as a scale."""
    return torch.full(
        (2, num_blocks, kv_heads, block_size, packed_items(head_dim) + SCALE_WORDS), -1, dtype=torch.int16
    )


@settings(max_examples=examples(20))
@given(
    head_dim=sizes,
    kv_heads=st.sampled_from([1, 2, 3]),
    block_size=st.sampled_from([1, 3, 16, 32]),
    tokens=st.integers(0, 40),
    dtype=st.sampled_from([torch.bfloat16, torch.float32]),
    seed=st.integers(0, 1 << 30),
)
def test_each_token_is_stored_in_its_own_slot(
    head_dim: int, kv_heads: int, block_size: int, tokens: int, dtype: torch.dtype, seed: int
) -> None:
    draw = torch.Generator().manual_seed(seed)
    num_blocks = 40 // block_size + 3
    kv = empty(num_blocks, kv_heads, block_size, head_dim)
    assert head_dim_of(kv) == head_dim
    keys_values = vectors_of(130, MAX_SPREAD, (tokens, 2, kv_heads, head_dim), seed)
    places = torch.randperm(num_blocks * block_size, generator=draw)
    mine, others = places[:tokens], places[tokens:]
    write_kv(keys_values.to(dtype), kv, mine // block_size, mine % block_size)
    found = read_kv(kv, torch.arange(num_blocks))
    assert found.shape == (2, num_blocks, kv_heads, block_size, head_dim)
    assert same_bits(found[:, mine // block_size, :, mine % block_size].contiguous(), keys_values)
    items, scales = packed_parts(kv)
    assert (items[:, others // block_size, :, others % block_size] == -1).all()
    assert (scales.view(torch.int16)[:, others // block_size, :, others % block_size] == -1).all()


def test_a_token_can_be_overwritten() -> None:
    kv = empty(3, 2, 4, 64)
    first, second = (vectors_of(100 + 40 * seed, MAX_SPREAD, (1, 2, 2, 64), seed) for seed in range(2))
    for keys_values in (first, second):
        write_kv(keys_values, kv, torch.tensor([2]), torch.tensor([1]))
    assert same_bits(read_kv(kv, torch.tensor([2]))[:, 0, :, 1].contiguous(), second[0])


def test_the_layout_is_as_described() -> None:
    """A block starts with the words of all heads, each in three planes of all tokens. The scales follow in the key part
    only, each key's next to its value's."""
    kv = empty(3, 2, 4, 64)
    keys_values = vectors_of(127, MAX_SPREAD, (1, 2, 2, 64), 3)
    write_kv(keys_values, kv, torch.tensor([1]), torch.tensor([2]))
    words, scales = pack(keys_values)
    keys, values = kv[:, 1].flatten(1)
    for head in range(2):
        planes = values[4 * 48 * head : 4 * 48 * (head + 1)].view(3, 4, 16)
        assert torch.equal(planes[:, 2].flatten(), words[0, 1, head])
        pairs = keys[2 * 4 * 48 :].view(torch.bfloat16).view(2, 4, 2)
        assert torch.equal(pairs[head, 2].float(), scales[0, :, head])
    assert (values[2 * 4 * 48 :] == -1).all()
    assert (values[:32] == -1).all()
