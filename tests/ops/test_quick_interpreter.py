"""The faster interpreter gives what Triton's own gives, and leaves it as it was."""

from __future__ import annotations

import pytest
import torch
from helpers import triton_mode
from helpers.quick_interpreter import quick_interpreter

# isort: split
import triton
import triton.language as tl

pytestmark = pytest.mark.skipif(not triton_mode.interpreted, reason="kernels run on the GPU here")


@triton.jit
def _one_more(x):
    return x + 1


@triton.jit
def _kernel(x_ptr, out_ptr, total_ptr, size, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < size, other=0)
    table = tl.reshape(_one_more(x), (2, BLOCK // 2))
    tl.store(out_ptr + at, tl.reshape(table * tl.max(table, 1)[:, None], (BLOCK,)), mask=at < size)
    tl.store(total_ptr + tl.program_id(0), tl.sum(x.to(tl.float32)))


def outputs(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    out, totals = torch.zeros_like(x), torch.zeros(3)
    _kernel[(3,)](x, out, totals, len(x), BLOCK=16)
    return out, totals


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.float32, torch.float16])
def test_results_are_those_of_the_plain_interpreter(dtype: torch.dtype) -> None:
    from triton.runtime import interpreter

    x = (torch.arange(40) * 7919 % 61).to(dtype)
    x[3] = 2**31 - 5 if dtype == torch.int32 else 9  # Its product overflows, as on a GPU.
    own = (interpreter._get_np_dtype, tl.block_type.__init__, tl.tensor.__init__, interpreter.GridExecutor.__call__)
    with quick_interpreter():
        quick = outputs(x)
    assert own == (
        *(interpreter._get_np_dtype, tl.block_type.__init__, tl.tensor.__init__),
        interpreter.GridExecutor.__call__,
    )
    for found, expected in zip(quick, outputs(x), strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
