"""CudaRunner with a draft model draws the tokens of the plain runner without drafts, several steps in flight; a model
that is its own draft model is right every time.

On a GPU this replays graphs; elsewhere the same code runs uncaptured, its kernels interpreted.
"""

from __future__ import annotations

import dataclasses
from contextlib import nullcontext

import pytest
import torch
from helpers.decode_table import want_few_programs
from helpers.quick_interpreter import quick_interpreter
from helpers.tiny_models import StateDictSource, config_of, make_reference
from helpers.triton_mode import device as place
from helpers.triton_mode import interpreted
from test_device_drafts import BUDGET, GREEDY, ROWS, SAMPLED, SIZES, Drive, decoder_for, requests

from millrace.config import RunConfig
from millrace.models.decoder import Decoder
from millrace.models.load import build_decoder
from millrace.models.spec.families import spec_from_config
from millrace.ops.attention import PagedAttention
from millrace.plan.drafts import DraftSettings
from millrace.run.cuda_runner import CudaRunner
from millrace.run.device.device import CpuDevice, open_device
from millrace.run.runner import Runner


def other_model() -> Decoder:
    """Of another shape than the target: other heads, so that its attention has other tiles."""
    model = make_reference("llama_tied")
    spec = spec_from_config(config_of(model))
    decoder = build_decoder(spec, StateDictSource.of(model), device=place, dtype=torch.float32)
    if not isinstance(decoder.attention, PagedAttention):
        attention = PagedAttention(
            spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.attention_scale, spec.attention_softcap
        )
        decoder._program.ops = dataclasses.replace(decoder._program.ops, attention=attention)
        decoder.native_stack = None
    return decoder


@pytest.mark.parametrize("is_own", [True, False], ids=["itself", "another"])
def test_a_draft_model_changes_no_token(is_own: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if interpreted:
        want_few_programs(monkeypatch)
    device = open_device(RunConfig(device="cuda")) if place.type == "cuda" else CpuDevice(1)
    plain = Runner(decoder_for(torch.device("cpu"), False), CpuDevice(1), **SIZES)
    drafter = decoder_for(place, True) if is_own else other_model()
    fast = CudaRunner(
        decoder_for(place, True), device, token_budget=BUDGET, speculate="draft", drafter=drafter, **SIZES
    )
    length = 6 if interpreted else 14
    kinds = [dataclasses.replace(kind, max_tokens=length) for kind in (GREEDY, SAMPLED, GREEDY)]
    first = 1 if interpreted else 2
    kinds = kinds[: first + 1]
    expected = Drive(plain, DraftSettings()).run(requests(kinds)[:first], requests(kinds)[first:])
    drive = Drive(fast, DraftSettings(max_drafts=3, max_places=ROWS))
    with quick_interpreter() if interpreted else nullcontext():
        assert drive.run(requests(kinds)[:first], requests(kinds)[first:]) == expected
    if is_own:  # three drafts were right whenever there was room for them
        assert max(drive.counts) == 4
