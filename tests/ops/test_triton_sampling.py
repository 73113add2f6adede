"""The sampling kernels one by one: greedy draw, noise, row records, and the candidate search."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from helpers.triton_mode import device, interpreted  # noqa: F401 (conftest.py reads it)

from millrace.ops.triton.row_records import ROW_DTYPE, ROW_WORDS, scatter_rows
from millrace.ops.triton.sampling import values
from millrace.ops.triton.sampling.draw import Cut, draw_full
from millrace.ops.triton.sampling.greedy import RACE_START, draw_greedy
from millrace.run.sampling.noise import uniforms

triton, tl = values.triton, values.tl


class GreedyDraw:
    def __init__(self, rows: list[int], max_rows: int = 16) -> None:
        self.rows = torch.tensor(rows, dtype=torch.int32, device=device)
        self.last_tokens = torch.full((max_rows,), -5, dtype=torch.int64, device=device)
        self.races = torch.full((max_rows,), RACE_START, dtype=torch.int64, device=device)
        self.arrivals = torch.zeros(max_rows, dtype=torch.int32, device=device)

    def run(self, logits: torch.Tensor, **options: int) -> torch.Tensor:
        out = torch.full((len(self.rows),), -9, dtype=torch.int32, device=device)
        draw_greedy(logits.to(device), self.rows, out, self.last_tokens, self.races, self.arrivals, **options)
        assert (self.races == RACE_START).all()
        assert (self.arrivals == 0).all()
        return out.cpu().long()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab", [1, 50, 333, 3001])
def test_greedy_is_argmax_for_any_number_of_programs(vocab: int, dtype: torch.dtype) -> None:
    torch.manual_seed(vocab)
    draw = GreedyDraw([4, 0, 9])
    for programs in (1, 8, 1000):
        logits = (torch.randn(3, vocab) * 3).to(dtype)
        tokens = draw.run(logits, tile=256, programs=programs)
        assert tokens.tolist() == logits.float().argmax(-1).tolist()
        assert draw.last_tokens[[4, 0, 9]].tolist() == tokens.tolist()


def test_out_start_is_read_on_the_device() -> None:
    """`out_start` is read when the kernel runs, so that a captured draw can write to a different place each time."""
    draw, logits = GreedyDraw([4, -1, 9]), torch.randn(3, 50, device=device)
    expected = logits.argmax(-1).tolist()
    columns = torch.zeros((16, ROW_WORDS), dtype=torch.int32, device=device)
    for start in (0, 5, 9):
        at = torch.tensor([start], dtype=torch.int32, device=device)
        for kind in ("greedy", "full"):
            out = torch.full((12,), -9, dtype=torch.int32, device=device)
            if kind == "greedy":
                draw_greedy(logits, draw.rows, out, draw.last_tokens, draw.races, draw.arrivals, at)
            else:
                draw_full(logits, draw.rows, draw.rows, columns, columns, out, draw.last_tokens, WHOLE, at)
            wanted = [-9] * 12
            wanted[start], wanted[start + 2] = expected[0], expected[2]
            assert out.tolist() == wanted


@pytest.mark.parametrize("kind", ["greedy", "full"])
def test_tokens_go_to_their_index(kind: str) -> None:
    draw, logits = GreedyDraw([4, -1, 9]), torch.randn(3, 50, device=device)
    start, index = (torch.tensor(values, dtype=torch.int32, device=device) for values in ([2], [3, 0, 1]))
    out = torch.full((7,), -9, dtype=torch.int32, device=device)
    if kind == "greedy":
        draw_greedy(logits, draw.rows, out, draw.last_tokens, draw.races, draw.arrivals, start, index)
    else:
        columns = torch.zeros((16, ROW_WORDS), dtype=torch.int32, device=device)
        draw_full(logits, draw.rows, draw.rows, columns, columns, out, draw.last_tokens, WHOLE, start, index)
    first, _, third = logits.argmax(-1).tolist()
    assert out.tolist() == [-9, -9, -9, third, -9, first, -9]


def test_greedy_ties_go_to_the_lowest_token() -> None:
    logits = torch.zeros(5, 1000)
    logits[0, [77, 300, 999]] = 4.0
    logits[1, [999, 256]] = 1.0
    logits[2] = -torch.inf
    logits[3, 0] = -1.0
    logits[3, 1::2] = -0.0
    logits[4] = -torch.inf
    logits[4, 640] = -3e38
    assert GreedyDraw([0, 1, 2, 3, 4]).run(logits, tile=128).tolist() == [77, 256, 0, 1, 640]


def test_greedy_skips_padding_and_handles_nan() -> None:
    logits = torch.randn(4, 700)
    logits[1] = torch.nan
    logits[2, 5] = torch.nan
    draw = GreedyDraw([3, -1, 5, -1])
    tokens = draw.run(logits, tile=128)
    assert tokens[1] == tokens[3] == -9
    assert tokens[0] == logits[0].argmax()
    assert 0 <= tokens[2] < 700
    assert draw.last_tokens.tolist() == [tokens[0] if row == 3 else tokens[2] if row == 5 else -5 for row in range(16)]


@triton.jit
def _noise_kernel(seeds, positions, out, N: tl.constexpr):
    at = tl.arange(0, N)
    # Kernels use it; on the host it has no name.
    tl.store(out + at, values._uniform(tl.load(seeds + at), tl.load(positions + at)))


def test_the_noise_is_bit_equal_to_the_reference() -> None:
    rng = np.random.default_rng(0)
    seeds = rng.integers(0, 2**64, 256, dtype=np.uint64)
    seeds[:4] = [0, 1, 2**63, 2**64 - 1]
    positions = rng.integers(0, 2**31, 256).astype(np.int32)
    positions[:2] = [0, 2**31 - 1]
    out = torch.zeros(256, dtype=torch.float64, device=device)
    _noise_kernel[(1,)](
        torch.from_numpy(seeds.view(np.int64)).to(device), torch.from_numpy(positions).to(device), out, N=256
    )
    assert out.cpu().numpy().tolist() == uniforms(seeds, positions.astype(np.uint64)).tolist()


def test_records_are_written_only_to_their_rows() -> None:
    packed = np.zeros(3, ROW_DTYPE)
    packed["row"], packed["seed"], packed["top_p"] = [6, 0, 3], [2**64 - 1, 7, 2**40], [0.25, 1.0, 0.5]
    columns = torch.full((8, ROW_WORDS), -1, dtype=torch.int32, device=device)
    scatter_rows(torch.from_numpy(packed.view(np.int32).reshape(3, -1)).to(device), columns)
    table = np.ascontiguousarray(columns.cpu().numpy()).view(ROW_DTYPE)[:, 0]
    assert table[[6, 0, 3]].tolist() == packed.tolist()
    assert (columns[[1, 2, 4, 5, 7]] == -1).all()


def one_row(logits: torch.Tensor, cut: Cut, **fields: float) -> int:
    record = np.zeros(1, ROW_DTYPE)
    record["top_p"], record["repetition"], record["temperature"] = 1.0, 1.0, 1.0
    for name, value in fields.items():
        record[name] = value
    columns = torch.from_numpy(record.view(np.int32).reshape(1, -1)).to(device)
    out = torch.full((1,), -9, dtype=torch.int64, device=device)
    zero = torch.zeros(1, dtype=torch.int32, device=device)
    draw_full(logits[None].to(device), zero, zero + 17, columns, zero, out, torch.zeros_like(out), cut)
    return int(out)


LISTED = Cut(tile=512, group=8, capacity=64, groups_wanted=8)
WHOLE = Cut(tile=512, group=8, capacity=4096)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "fields",
    [{"top_k": 5}, {"top_p": 0.7}, {"min_p": 0.1}, {"top_k": 30, "top_p": 0.9}, {"min_p": 1e-6, "top_p": 0.8}],
)
def test_a_candidate_list_draws_the_same_token_as_the_whole_row(fields: dict[str, float], dtype: torch.dtype) -> None:
    torch.manual_seed(len(fields))
    for seed in range(2):
        logits = (torch.randn(1500) * (4.0 if seed else 0.3)).to(dtype)
        assert one_row(logits, LISTED, seed=seed, **fields) == one_row(logits, WHOLE, seed=seed, **fields)


def test_more_ties_than_the_list_holds() -> None:
    logits = torch.full((1000,), -3.0)
    logits[100:900] = 2.0
    for fields in ({"top_k": 3}, {"top_p": 0.01}, {"min_p": 1.0}):
        assert 100 <= one_row(logits, LISTED, seed=3, **fields) < 900


@pytest.mark.filterwarnings("ignore:invalid value encountered")  # NumPy warns about infinities in the interpreter
@pytest.mark.parametrize("cut", [LISTED, WHOLE])
def test_degenerate_rows_still_draw_a_token(cut: Cut) -> None:
    nothing = torch.full((600,), -torch.inf)
    single, infinite, broken = nothing.clone(), torch.zeros(600), torch.randn(600)
    single[599] = -1e30
    infinite[321] = torch.inf
    broken[::3] = torch.nan
    everything = {"top_k": 7, "top_p": 0.5, "min_p": 0.2, "seed": 1}
    assert 0 <= one_row(nothing, cut, **everything) < 600
    assert one_row(single, cut, **everything) == 599
    assert one_row(single, cut, seed=5) == 599
    assert one_row(infinite, cut, **everything) == 321
    assert one_row(broken, cut, **everything) % 3 != 0
