"""The two kernels of latent attention's projections against the reference."""

from __future__ import annotations

import pytest
import torch
from helpers.triton_mode import device

from millrace.ops.attention.latent_qkv import TorchLatentQkv, make_triton
from millrace.ops.elementwise.norm import rms_norm
from millrace.ops.elementwise.rope import rope_angles

RANK, ROPE, HEADS, TOKENS, BLOCK = 40, 12, 6, 7, 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("pairs_neighbours", [False, True])
def test_kernels_equal_the_reference(pairs_neighbours: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    norm = torch.rand(RANK, device=device) + 0.5
    arguments = (RANK, ROPE, pairs_neighbours, 1e-6, norm, rms_norm)
    angles = rope_angles(torch.arange(3, 3 + TOKENS, device=device), torch.rand(ROPE // 2, device=device), 1.1)
    projected = torch.randn(TOKENS, 9 + RANK + ROPE, device=device).to(dtype)[:, 9:]
    block_ids, offsets = torch.tensor([1, 1, 3, 3, 2, 4, 4]), torch.tensor([2, 3, 0, 1, 3, 0, 2])
    latents = torch.randn(HEADS, TOKENS, RANK, device=device).to(dtype).transpose(0, 1)
    rotated = torch.randn(TOKENS, HEADS, 5 + ROPE, device=device).to(dtype)[..., 5:]
    caches, joined = [], []
    for parts in (TorchLatentQkv(*arguments), make_triton(*arguments)):
        kv = torch.full((1, 5, 1, BLOCK, RANK + ROPE), 7.0, dtype=dtype, device=device)
        parts.write(projected, angles, kv, block_ids.to(device), offsets.to(device))
        caches.append(kv)
        joined.append(parts.join(latents, rotated, angles))
    tolerance = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 1e-2, "atol": 1e-2}
    torch.testing.assert_close(caches[1], caches[0], **tolerance)
    torch.testing.assert_close(joined[1], joined[0], **tolerance)
    assert (caches[1] == 7.0).any(), "other slots are left as they are"
