"""A feature drafter in C++ and in 8 bits: bit-equal to the same ops called one by one, and close to full precision."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from helpers.drafter_files import HIDDEN, draw, layer_config, layer_tensors, token_maps, write
from helpers.inside import weights_of
from helpers.tiny_models import VOCAB
from run.test_auto_drafts import FIXED, drive
from run.test_model_drafters import DRAFT_VOCAB, load, runner_of

from millrace.config import Quantization
from millrace.models.decoder import Decoder
from millrace.models.drafters.load import DrafterFiles, drafter_bytes, load_drafter, open_drafter
from millrace.models.drafters.program import EagleDrafter
from millrace.ops.linear.stored import StoredLinear, blocks_of, packed_bytes
from millrace.plan.drafts import DraftSettings
from millrace.run.cpu.draft_pass import NativeEaglePass
from millrace.run.drafting.chain import ChainDrafter, DraftInputs, PassStates
from millrace.run.drafting.passes import EaglePass

NUM_BLOCKS = 60
Written = list[tuple[list[int], list[int], list[int], torch.Tensor | None, torch.Tensor | None]]


def eagle(folder: Path, target: Decoder, **changes: Any) -> DrafterFiles:
    tensors = {"fc.weight": draw(HIDDEN, 2 * HIDDEN), "fc.bias": draw(HIDDEN)}
    tensors |= layer_tensors("layers.0.", input_norm=False)
    return open_drafter(write(folder, layer_config(VOCAB), tensors), target.spec)


def normed_eagle(folder: Path, target: Decoder) -> DrafterFiles:
    """As speculators writes it, with all norms, and layers enough for one that is not the first."""
    tensors = {"fusion_fc.weight": draw(HIDDEN, 2 * HIDDEN)} | layer_tensors("transformer.", input_norm=False)
    names = ("embedding_layernorm", "hidden_layernorm", "pre_lm_head_layernorm")
    tensors |= {f"{name}.weight": draw(HIDDEN, centre=1.0) for name in names}
    config = {
        "speculators_model_type": "eagle",
        "layernorms": True,
        "fusion_bias": False,
        "transformer_layer_config": layer_config(VOCAB),
    }
    return open_drafter(write(folder, config, tensors), target.spec)


def eagle3(folder: Path, target: Decoder, **changes: Any) -> DrafterFiles:
    tensors = {"fc.weight": draw(HIDDEN, 3 * HIDDEN), "norm.weight": draw(HIDDEN, centre=1.0)}
    tensors |= {"midlayer.hidden_norm.weight": draw(HIDDEN, centre=1.0), "lm_head.weight": draw(DRAFT_VOCAB, HIDDEN)}
    tensors |= token_maps(DRAFT_VOCAB, VOCAB)[0] | layer_tensors("midlayer.", 2 * HIDDEN)
    layers = {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}
    config = layer_config(VOCAB, draft_vocab_size=DRAFT_VOCAB, **layers, **changes)
    return open_drafter(write(folder, config, tensors), target.spec)


def eagle3_normed(folder: Path, target: Decoder) -> DrafterFiles:
    return eagle3(folder, target, norm_before_residual=True)


def recorded(own: type[EaglePass] | type[NativeEaglePass], monkeypatch: Any) -> Written:
    """What passes of this kind compute from now on."""
    found: Written = []
    forward, write_only = own.forward, own.write

    def kept(self: Any, inputs: DraftInputs) -> PassStates:
        states = forward(self, inputs)
        found.append((*columns(inputs), states.for_head.clone(), states.hidden.clone()))
        return states

    def kept_write(self: Any, inputs: DraftInputs) -> None:
        write_only(self, inputs)
        found.append((*columns(inputs), None, None))

    monkeypatch.setattr(own, "forward", kept)
    monkeypatch.setattr(own, "write", kept_write)
    return found


def columns(inputs: DraftInputs) -> tuple[list[int], list[int], list[int]]:
    return inputs.rows.tolist(), inputs.starts.tolist(), inputs.tokens.tolist()


@pytest.mark.parametrize("quantization", ["none", "int8"])
@pytest.mark.parametrize("make", [eagle, normed_eagle, eagle3, eagle3_normed])
def test_the_native_pass_is_bit_equal(make: Any, quantization: Quantization, tmp_path: Path, monkeypatch: Any) -> None:
    """With chunked prompts, several rows, chains and forced ends."""
    torch.manual_seed(5)
    decoder = load("llama_tied")
    files = make(tmp_path, decoder)
    drafter = load_drafter(files, decoder, quantization=quantization)
    assert isinstance(drafter, EagleDrafter)
    assert drafter.native_stack is not None
    native, plain = recorded(NativeEaglePass, monkeypatch), recorded(EaglePass, monkeypatch)
    tokens, drafted = drive(runner_of(decoder, drafter, NUM_BLOCKS, "eagle"), FIXED)
    assert len(native) > 50
    assert not plain
    drafter.native_stack = None
    expected, expected_drafted = drive(runner_of(decoder, drafter, NUM_BLOCKS, "eagle"), FIXED)
    assert (tokens, drafted) == (expected, expected_drafted)
    assert len(native) == len(plain)
    for ours, theirs in zip(native, plain, strict=True):
        assert ours[:3] == theirs[:3]
        for one, other in zip(ours[3:], theirs[3:], strict=True):
            assert (one is None) == (other is None)
            assert one is None or other is None or torch.equal(one, other)


def test_a_drafter_whose_target_has_another_head_runs_op_by_op(tmp_path: Path) -> None:
    decoder = load("llama")
    drafter = load_drafter(eagle(tmp_path, decoder), decoder)
    assert isinstance(drafter, EagleDrafter)
    assert drafter.native_stack is None
    expected, _ = drive(runner_of(decoder, None, NUM_BLOCKS), DraftSettings())
    assert drive(runner_of(decoder, drafter, NUM_BLOCKS, "eagle"), FIXED)[0] == expected


def test_matrices_are_held_in_8_bits_where_their_inputs_allow_it(tmp_path: Path) -> None:
    decoder = load("llama_tied")
    files = eagle(tmp_path, decoder)
    drafter = load_drafter(files, decoder, quantization="int8")
    assert isinstance(drafter, EagleDrafter)
    # Results do not show which form the weights have.
    mixer: Any = weights_of(drafter).layers[0].mixer
    assert isinstance(weights_of(drafter).fc, StoredLinear)
    assert isinstance(mixer.out, StoredLinear)
    assert not isinstance(mixer.qkv, StoredLinear), "48 inputs are no whole groups of 32"
    full, small = (drafter_bytes(files, torch.float32, kind) for kind in ("none", "int8"))
    # fc and the output projection have 96 inputs.
    assert full - small == 2 * (48 * 96 * 4 - packed_bytes("Q8_0", 48, 96)) > 0


def test_blocks_are_those_of_the_format() -> None:
    torch.manual_seed(1)
    matrix = draw(5, 96) * torch.logspace(-6, 3, 5)[:, None]
    matrix[3, :32] = 0.0
    blocks = blocks_of(matrix)
    found = gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType.Q8_0)
    groups = np.abs(matrix.numpy()).reshape(5, 3, 32).max(axis=2)
    error = np.abs(found - matrix.numpy()).reshape(5, 3, 32).max(axis=2)
    # Half a step, and what float16 rounds off the scale; its smallest numbers are coarse.
    assert (error <= groups / 127 * (0.5 + 127 / 2048) + 127 * 2.0**-25).all()
    assert (found[3, :32] == 0).all()


def test_drafts_in_8_bits_are_mostly_those_of_full_precision(tmp_path: Path, monkeypatch: Any) -> None:
    torch.manual_seed(5)
    decoder = load("llama_tied")
    files = eagle(tmp_path, decoder)
    proposed: list[list[list[int]]] = [[], []]
    propose = ChainDrafter.propose
    for own, quantization in zip(proposed, ("none", "int8"), strict=True):
        drafter = load_drafter(files, decoder, quantization=quantization)

        def kept(self: ChainDrafter, asks: Any, into: list[list[int]] = own) -> Any:
            found = propose(self, asks)
            into += [drafts[:1].tolist() for drafts in found]
            return found

        monkeypatch.setattr(ChainDrafter, "propose", kept)
        drive(runner_of(decoder, drafter, NUM_BLOCKS, "eagle"), DraftSettings(max_drafts=1, max_places=99))
    same = sum(one == other for one, other in zip(*proposed, strict=True))
    assert same > 0.9 * len(proposed[0])
    assert len(proposed[0]) > 100
