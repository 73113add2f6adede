"""Drafters in every supported format: loaded, run over paged KV and held to a plain reference; the rest is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.drafter_files import (
    HIDDEN,
    Layer,
    Tensors,
    draw,
    layer_config,
    layer_tensors,
    norm,
    part,
    token_maps,
    write,
)
from helpers.paged import make_batch
from helpers.tiny_models import VOCAB, StateDictSource, config_of, make_reference

from millrace.errors import ModelError
from millrace.models.decoder import Decoder
from millrace.models.drafters.load import load_drafter, open_drafter
from millrace.models.drafters.modules import EagleModule, MedusaModule
from millrace.models.drafters.program import EagleDrafter, MedusaDrafter
from millrace.models.load import build_decoder
from millrace.models.spec.families import spec_from_config

CPU = torch.device("cpu")
DRAFT_VOCAB = 31
BLOCK = 4
NUM_PAIRS, CHAIN = 7, 3


@pytest.fixture(scope="module")
def target() -> Decoder:
    model = make_reference("llama")
    return build_decoder(spec_from_config(config_of(model)), StateDictSource.of(model), device=CPU, dtype=torch.float32)


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(5)


Step = Callable[[torch.Tensor, torch.Tensor, int], tuple[torch.Tensor, torch.Tensor]]
"""(embedding, hidden state, position) -> (hidden state of the next step, logits); keeps its keys and values."""


def eagle_step(t: Tensors, head: torch.Tensor, layer: Tensors, *, fc: str = "fc", norms: bool = False) -> Step:
    run = Layer(layer)

    def step(embedded: torch.Tensor, hidden: torch.Tensor, position: int) -> tuple[torch.Tensor, torch.Tensor]:
        if norms:
            embedded = norm(embedded, t["embedding_layernorm.weight"])
        x = t[f"{fc}.weight"].double() @ torch.cat((embedded, hidden)) + t.get(f"{fc}.bias", torch.zeros(1)).double()
        state = run(norm(x, layer["input_layernorm.weight"]) if norms else x, x, position)
        return state, head.double() @ (norm(state, t["pre_lm_head_layernorm.weight"]) if norms else state)

    return step


def eagle3_step(t: Tensors, layer: Tensors, *, norm_before_residual: bool = False) -> Step:
    run = Layer(layer)

    def step(embedded: torch.Tensor, hidden: torch.Tensor, position: int) -> tuple[torch.Tensor, torch.Tensor]:
        normed = norm(hidden, layer["hidden_norm.weight"])
        x = torch.cat((norm(embedded, layer["input_layernorm.weight"]), normed))
        state = run(x, normed if norm_before_residual else hidden, position)
        return state, t["lm_head.weight"].double() @ norm(state, t["norm.weight"])

    return step


def check_chain(drafter: EagleDrafter, target: Decoder, hidden: torch.Tensor, fused: torch.Tensor, step: Step) -> None:
    """Pairs with true states first, then a chain of the drafter's own states and tokens, as the engine runs it."""
    torch.testing.assert_close(drafter.fuse(hidden).double(), fused, atol=1e-4, rtol=1e-4)
    assert drafter.spec.decoder is not None
    kv = [torch.full(drafter.spec.decoder.kv_shape(9, BLOCK), float("nan")) for _ in range(drafter.spec.num_kv_layers)]
    tokens = torch.randint(0, VOCAB, (NUM_PAIRS,))
    blocks = [7, 2, 5]
    batch = make_batch([(tokens.tolist(), 0, blocks)], BLOCK)
    states = drafter.step(drafter.fuse(hidden), batch, kv)
    theirs = [
        step(target.embed(token[None])[0].double(), own, index)
        for index, (token, own) in enumerate(zip(tokens, fused, strict=True))
    ]
    torch.testing.assert_close(
        drafter.logits(states.for_head).double(), torch.stack([item[1] for item in theirs]), atol=1e-3, rtol=1e-3
    )
    ours, their_state = states.hidden[-1:], theirs[-1][0]
    token = drafter.token_ids(drafter.logits(states.for_head[-1:]).argmax(-1))
    for index in range(NUM_PAIRS, NUM_PAIRS + CHAIN):
        states = drafter.step(ours, make_batch([(token.tolist(), index, blocks)], BLOCK), kv)
        their_state, logits = step(target.embed(token)[0].double(), their_state, index)
        torch.testing.assert_close(drafter.logits(states.for_head)[0].double(), logits, atol=1e-3, rtol=1e-3)
        ours, token = states.hidden, drafter.token_ids(drafter.logits(states.for_head).argmax(-1))


def head_of(target: Decoder) -> torch.Tensor:
    return target.logits(torch.eye(HIDDEN)).T.contiguous()


def load(folder: Path, target: Decoder) -> Any:
    return load_drafter(open_drafter(folder, target.spec), target)


# --- each format against the reference ---


@pytest.mark.parametrize("file", ["model.safetensors", "pytorch_model.bin"])
def test_eagle(tmp_path: Path, target: Decoder, file: str) -> None:
    tensors = {"fc.weight": draw(HIDDEN, 2 * HIDDEN), "fc.bias": draw(HIDDEN)}
    tensors |= layer_tensors("layers.0.", input_norm=False)
    folder = write(tmp_path, layer_config(VOCAB, architectures=["LlamaForCausalLM"]), tensors, file)
    hidden = draw(NUM_PAIRS, HIDDEN)
    drafter = load(folder, target)
    assert drafter.spec.kind == "eagle"
    assert not drafter.spec.target_layers
    check_chain(
        drafter, target, hidden, hidden.double(), eagle_step(tensors, head_of(target), part(tensors, "layers.0."))
    )


def test_eagle_with_its_own_embedding_and_the_targets_shares_one(tmp_path: Path, target: Decoder) -> None:
    tensors = {"fc.weight": draw(HIDDEN, 2 * HIDDEN), **layer_tensors("layers.0.", input_norm=False)}
    tensors["embed_tokens.weight"] = target.embed(torch.arange(VOCAB)).clone()
    drafter = load(write(tmp_path, layer_config(VOCAB), tensors), target)
    hidden = draw(NUM_PAIRS, HIDDEN)
    check_chain(
        drafter, target, hidden, hidden.double(), eagle_step(tensors, head_of(target), part(tensors, "layers.0."))
    )


def eagle3_files(folder: Path, **changes: Any) -> tuple[Path, Tensors, torch.Tensor]:
    maps, ids = token_maps(DRAFT_VOCAB, VOCAB)
    tensors = {"fc.weight": draw(HIDDEN, 3 * HIDDEN), "norm.weight": draw(HIDDEN, centre=1.0)}
    tensors |= {"midlayer.hidden_norm.weight": draw(HIDDEN, centre=1.0), "lm_head.weight": draw(DRAFT_VOCAB, HIDDEN)}
    tensors |= maps | layer_tensors("midlayer.", 2 * HIDDEN)
    config = layer_config(VOCAB, draft_vocab_size=DRAFT_VOCAB, architectures=["LlamaForCausalLMEagle3"], **changes)
    return write(folder, config, tensors), tensors, ids


def test_eagle3(tmp_path: Path, target: Decoder) -> None:
    folder, tensors, ids = eagle3_files(tmp_path)
    drafter = load(folder, target)
    # The published default of three states, for a target of three layers.
    assert drafter.spec.target_layers == (2, 1, 0)
    assert drafter.token_ids(torch.arange(DRAFT_VOCAB)).tolist() == ids.tolist()
    hidden = draw(NUM_PAIRS, 3 * HIDDEN)
    fused = hidden.double() @ tensors["fc.weight"].double().T
    check_chain(drafter, target, hidden, fused, eagle3_step(tensors, part(tensors, "midlayer.")))


def test_speculators_eagle(tmp_path: Path, target: Decoder) -> None:
    tensors = {"fusion_fc.weight": draw(HIDDEN, 2 * HIDDEN), "fusion_fc.bias": draw(HIDDEN)}
    tensors |= layer_tensors("transformer.")
    for name in ("embedding_layernorm.weight", "pre_lm_head_layernorm.weight"):
        tensors[name] = draw(HIDDEN, centre=1.0)
    config = {
        "architectures": ["EagleSpeculator"],
        "speculators_model_type": "eagle",
        "speculators_config": {"algorithm": "eagle"},
        "layernorms": True,
        "fusion_bias": True,
        "transformer_layer_config": layer_config(VOCAB),
    }
    drafter = load(write(tmp_path, config, tensors), target)
    hidden, layer = draw(NUM_PAIRS, HIDDEN), part(tensors, "transformer.")
    step = eagle_step(tensors, head_of(target), layer, fc="fusion_fc", norms=True)
    check_chain(drafter, target, hidden, hidden.double(), step)


def speculators_eagle3_config(**changes: Any) -> dict[str, Any]:
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_config": {"algorithm": "eagle3", "verifier": {"name_or_path": "x"}},
        "draft_vocab_size": DRAFT_VOCAB,
        "norm_before_residual": True,
        "eagle_aux_hidden_state_layer_ids": [1, 3],
        "transformer_layer_config": layer_config(VOCAB),
        **changes,
    }


def test_speculators_eagle3_with_norms_of_its_own(tmp_path: Path, target: Decoder) -> None:
    maps, _ = token_maps(DRAFT_VOCAB, VOCAB)
    tensors = {"fc.weight": draw(HIDDEN, 2 * HIDDEN), "norm.weight": draw(HIDDEN, centre=1.0)}
    tensors |= {"layers.0.hidden_norm.weight": draw(HIDDEN, centre=1.0), "lm_head.weight": draw(DRAFT_VOCAB, HIDDEN)}
    tensors |= {f"fc_norm.{index}.weight": draw(HIDDEN, centre=1.0) for index in range(2)}
    tensors |= maps | layer_tensors("layers.0.", 2 * HIDDEN)
    drafter = load(write(tmp_path, speculators_eagle3_config(), tensors), target)
    assert drafter.spec.target_layers == (1, 3)
    hidden = draw(NUM_PAIRS, 2 * HIDDEN)
    normed = torch.stack(
        [
            torch.cat([norm(half, tensors[f"fc_norm.{index}.weight"]) for index, half in enumerate(row.chunk(2))])
            for row in hidden.double()
        ]
    )
    fused = normed @ tensors["fc.weight"].double().T
    step = eagle3_step(tensors, part(tensors, "layers.0."), norm_before_residual=True)
    check_chain(drafter, target, hidden, fused, step)


def medusa_reference(hidden: torch.Tensor, blocks: list[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
    x = hidden.double()
    for weight, bias in blocks:
        inner = x @ weight.double().T + bias.double()
        x = x + inner * inner.sigmoid()
    return x


@pytest.mark.parametrize("file", ["medusa_lm_head.pt", "medusa_lm_head.safetensors"])
def test_medusa(tmp_path: Path, target: Decoder, file: str) -> None:
    """Published configs may name fewer heads than the file holds; the file decides."""
    tensors: Tensors = {}
    for head in range(3):
        for block in range(2):
            tensors[f"{head}.{block}.linear.weight"] = draw(HIDDEN, HIDDEN)
            tensors[f"{head}.{block}.linear.bias"] = draw(HIDDEN)
        tensors[f"{head}.2.weight"] = draw(VOCAB, HIDDEN)
    folder = write(tmp_path, {"medusa_num_heads": 2, "medusa_num_layers": 2}, tensors, file)
    drafter = load(folder, target)
    assert isinstance(drafter, MedusaDrafter)
    assert drafter.spec.max_drafts == 3
    hidden = draw(5, HIDDEN)
    logits = drafter.logits(hidden)
    for head in range(3):
        blocks = [
            (tensors[f"{head}.{block}.linear.weight"], tensors[f"{head}.{block}.linear.bias"]) for block in range(2)
        ]
        theirs = medusa_reference(hidden, blocks) @ tensors[f"{head}.2.weight"].double().T
        torch.testing.assert_close(logits[head].double(), theirs, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(drafter.logits(hidden, 1)[0], logits[0])


def test_medusa_with_one_reduced_head_for_all(tmp_path: Path, target: Decoder) -> None:
    ids = torch.randperm(VOCAB)[:DRAFT_VOCAB]
    tensors = {"blocks.0.layers.0.weight": draw(HIDDEN, HIDDEN), "blocks.1.layers.0.weight": draw(HIDDEN, HIDDEN)}
    tensors |= {"lm_head.weight": draw(DRAFT_VOCAB, HIDDEN), "token_map": ids}
    drafter = load(write(tmp_path, {"model_type": "medusa", "num_heads": 2}, tensors), target)
    assert drafter.token_ids(torch.arange(DRAFT_VOCAB)).tolist() == ids.tolist()
    hidden = draw(4, HIDDEN)
    for head, logits in enumerate(drafter.logits(hidden)):
        x = medusa_reference(hidden, [(tensors[f"blocks.{head}.layers.0.weight"], torch.zeros(HIDDEN))])
        torch.testing.assert_close(logits.double(), x @ tensors["lm_head.weight"].double().T, atol=1e-4, rtol=1e-4)


def test_a_decoder_is_a_draft_model(tmp_path: Path, target: Decoder) -> None:
    tensors = {"model.embed_tokens.weight": draw(VOCAB, HIDDEN), "model.norm.weight": draw(HIDDEN)}
    config = layer_config(VOCAB, architectures=["LlamaForCausalLM"], tie_word_embeddings=True)
    found = open_drafter(write(tmp_path, config, {**tensors, **layer_tensors("model.layers.0.")}), target.spec)
    assert found.spec.kind == "draft"
    assert found.spec.decoder is not None


# --- the module that training optimises means the same ---


def canonical_state(folder: Path, target: Decoder) -> tuple[Any, Tensors]:
    files = open_drafter(folder, target.spec)
    names = [name for name in files.tensors.names() if name not in ("d2t", "t2d", "token_map")]
    return files, {name: files.tensors.get(name) for name in names}


def test_the_module_means_the_same_for_every_chain_at_once(tmp_path: Path, target: Decoder) -> None:
    folder, tensors, _ = eagle3_files(tmp_path)
    files, state = canonical_state(folder, target)
    module = EagleModule(files.spec)
    module.load_state_dict(state)
    hidden, tokens = draw(NUM_PAIRS, 3 * HIDDEN), torch.randint(0, VOCAB, (NUM_PAIRS + CHAIN,))
    kv, states = module.new_kv(), module.fuse(hidden[None])
    fused = hidden.double() @ tensors["fc.weight"].double().T
    found = []
    for depth in range(CHAIN):
        embedded = target.embed(tokens[depth : depth + NUM_PAIRS]).clone()[None]
        out = module(embedded, states, torch.arange(NUM_PAIRS)[None] + depth, kv)
        states = out.hidden
        found.append(module.lm_head(out.for_head)[0])
    for start in range(NUM_PAIRS):
        step = eagle3_step(tensors, part(tensors, "midlayer."))
        for index in range(start):
            step(target.embed(tokens[index : index + 1])[0].double(), fused[index], index)
        state = fused[start]
        for depth in range(CHAIN):
            place = start + depth
            state, logits = step(target.embed(tokens[place : place + 1])[0].double(), state, place)
            torch.testing.assert_close(found[depth][start].double(), logits, atol=1e-3, rtol=1e-3)


def test_the_medusa_module_has_the_checkpoints_names(tmp_path: Path, target: Decoder) -> None:
    tensors = {f"{head}.0.linear.{kind}": draw(HIDDEN, HIDDEN) for head in range(2) for kind in ("weight",)}
    tensors |= {f"{head}.0.linear.bias": draw(HIDDEN) for head in range(2)}
    tensors |= {f"{head}.1.weight": draw(VOCAB, HIDDEN) for head in range(2)}
    folder = write(tmp_path, {"medusa_num_heads": 2}, tensors)
    files, state = canonical_state(folder, target)
    module = MedusaModule(files.spec)
    module.load_state_dict(state)
    hidden = draw(3, HIDDEN)
    logits = load(folder, target).logits(hidden)
    for index, (head, own) in enumerate(zip(module.heads, module(hidden), strict=True)):
        torch.testing.assert_close(head.head(own), logits[index], atol=1e-4, rtol=1e-4)


# --- refusals ---


def refused(folder: Path, target: Decoder, *parts: str) -> None:
    with pytest.raises(ModelError) as error:
        load(folder, target)
    for text in (str(folder), *parts):
        assert text in str(error.value)


def test_other_speculators_are_refused_by_name(tmp_path: Path, target: Decoder) -> None:
    config = speculators_eagle3_config(speculators_model_type="dflash")
    refused(write(tmp_path, config, {"fc.weight": draw(2, 2)}), target, "dflash", "eagle3", "train-drafter")


def test_an_unknown_directory_is_refused_with_its_architecture(tmp_path: Path, target: Decoder) -> None:
    config = {"architectures": ["MLPSpeculatorPreTrainedModel"], "model_type": "mlp_speculator"}
    refused(write(tmp_path, config, {"emb.0.weight": draw(2, 2)}), target, "MLPSpeculator", "EAGLE-3", "Medusa")


def test_sizes_of_another_model_are_refused_with_both(tmp_path: Path, target: Decoder) -> None:
    tensors = {"fc.weight": draw(HIDDEN, 2 * HIDDEN), **layer_tensors("layers.0.", input_norm=False)}
    config = layer_config(VOCAB)
    refused(write(tmp_path / "v", layer_config(120), tensors), target, "vocabulary 120", str(VOCAB), "another model")
    refused(write(tmp_path / "h", {**config, "hidden_size": 64}, tensors), target, "hidden size 64", str(HIDDEN))
    tensors["fc.weight"] = draw(HIDDEN, 3 * HIDDEN)
    refused(write(tmp_path / "f", config, tensors), target, "fc.weight", "(48, 144)", "(48, 96)")
    medusa = {"0.0.linear.weight": draw(64, 64), "0.1.weight": draw(VOCAB, 64)}
    refused(write(tmp_path / "m", {"medusa_num_heads": 1}, medusa), target, "hidden size 64", str(HIDDEN))


def test_eagle3_for_another_model_is_refused(tmp_path: Path, target: Decoder) -> None:
    folder, _, _ = eagle3_files(tmp_path / "a", eagle_aux_hidden_state_layer_ids=[1, 2, 9])
    refused(folder, target, "[1, 2, 9]", "3 layers")
    folder, _, _ = eagle3_files(tmp_path / "b", eagle_aux_hidden_state_layer_ids=[1, 2])
    refused(folder, target, "144", "2 states of 48")


def test_a_reduced_vocabulary_needs_its_map(tmp_path: Path, target: Decoder) -> None:
    folder, tensors, _ = eagle3_files(tmp_path)
    del tensors["d2t"]
    write(folder, layer_config(VOCAB, draft_vocab_size=DRAFT_VOCAB), tensors)
    refused(folder, target, str(DRAFT_VOCAB), str(VOCAB), "d2t")
    tensors["d2t"] = torch.full((DRAFT_VOCAB,), VOCAB)
    write(folder, layer_config(VOCAB, draft_vocab_size=DRAFT_VOCAB), tensors)
    with pytest.raises(ModelError, match=f"token {VOCAB}"):
        load(folder, target)


def test_missing_and_foreign_tensors_are_named(tmp_path: Path, target: Decoder) -> None:
    tensors = {"fc.weight": draw(HIDDEN, 2 * HIDDEN), **layer_tensors("layers.0.", input_norm=False)}
    foreign = {**tensors, "layers.0.mlp.router.weight": draw(4, HIDDEN)}
    refused(write(tmp_path / "f", layer_config(VOCAB), foreign), target, "layers.0.mlp.router.weight", "variant")
    del tensors["layers.0.self_attn.o_proj.weight"]
    refused(write(tmp_path / "m", layer_config(VOCAB), tensors), target, "self_attn.o_proj.weight", "Download")


def test_a_torch_file_with_code_is_not_executed(tmp_path: Path, target: Decoder) -> None:
    folder = write(tmp_path, {"medusa_num_heads": 1}, {}, "medusa_lm_head.pt")
    torch.save({"x": Path("x")}, folder / "medusa_lm_head.pt")
    refused(folder, target, "safetensors")


def test_directories_without_config_or_weights_say_what_is_missing(tmp_path: Path, target: Decoder) -> None:
    refused(tmp_path, target, "config.json")
    (tmp_path / "config.json").write_text("{}", encoding="utf-8")
    refused(tmp_path, target, "medusa_lm_head.pt")
