"""Loading: missing or wrong tensors are named, bytes are counted, results do not depend on the batch."""

from __future__ import annotations

import logging
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.paged import PagedDriver
from helpers.tiny_models import CASES, VOCAB, StateDictSource, config_of, make_reference

from millrace.errors import ConfigError, ModelError
from millrace.models.decoder import Decoder
from millrace.models.load import build_decoder, load_decoder, weight_bytes
from millrace.models.spec.families import spec_from_config
from millrace.models.weight_sizes import spec_weight_bytes
from millrace.sources.resolve import resolve_model

CPU = torch.device("cpu")


def tiny(case: str = "llama") -> tuple[Any, StateDictSource]:
    model = make_reference(case)
    return spec_from_config(config_of(model)), StateDictSource.of(model)


def build(spec: Any, source: StateDictSource, **options: Any) -> Decoder:
    return build_decoder(spec, source, device=CPU, **{"dtype": torch.float32, **options})


# --- refusals ---


def test_missing_tensor_names_folder_tensor_and_shape() -> None:
    spec, source = tiny()
    del source.tensors["model.layers.1.mlp.up_proj.weight"]
    with pytest.raises(ModelError) as error:
        build(spec, source)
    text = str(error.value)
    for part in ("/models/tiny", "model.layers.1.mlp.up_proj.weight", "(80, 48)", "llama", "Download"):
        assert part in text


def test_missing_head_names_the_setting() -> None:
    spec, source = tiny()
    del source.tensors["lm_head.weight"]
    with pytest.raises(ModelError, match="tie_word_embeddings"):
        build(spec, source)


def test_wrong_shape_names_file_tensor_and_both_shapes() -> None:
    spec, source = tiny()
    source.tensors["model.norm.weight"] = torch.ones(47)
    with pytest.raises(ModelError) as error:
        build(spec, source)
    for part in ("model.safetensors", "model.norm.weight", "(47,)", "(48,)"):
        assert part in str(error.value)


def test_a_tensor_that_would_change_the_result_is_refused() -> None:
    spec, source = tiny()
    source.tensors["model.layers.0.self_attn.q_proj.bias"] = torch.zeros(96)
    with pytest.raises(ModelError, match=r"q_proj\.bias does not belong"):
        build(spec, source)


def test_other_leftovers_are_logged_and_known_buffers_ignored(caplog: pytest.LogCaptureFixture) -> None:
    spec, source = tiny()
    source.tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(8)
    with caplog.at_level(logging.WARNING):
        build(spec, source)
    assert not caplog.records
    source.tensors["model.layers.3.eh_proj.weight"] = torch.zeros(8)
    with caplog.at_level(logging.WARNING):
        build(spec, source)
    assert "model.layers.3.eh_proj.weight" in caplog.text


def test_deterministic_without_a_version_fails_before_reading() -> None:
    spec, source = tiny()
    with pytest.raises(ConfigError, match="deterministic"):
        build(spec, source, dtype=torch.float16, deterministic=True)


# --- memory ---


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_progress_ends_at_the_predicted_bytes(case: str, dtype: torch.dtype) -> None:
    spec, source = tiny(case)
    seen: list[tuple[int, int]] = []
    decoder = build(spec, source, dtype=dtype, progress=lambda done, total: seen.append((done, total)))
    total = spec_weight_bytes(spec, dtype)
    assert decoder.num_bytes == total
    assert {pair[1] for pair in seen} == {total}
    done = [pair[0] for pair in seen]
    assert done == sorted(done)
    assert done[-1] == total


def test_tied_head_is_stored_once() -> None:
    spec, source = tiny("llama_tied")
    untied, _ = tiny("llama")
    assert "lm_head.weight" not in source.tensors
    table = spec.vocab_size * spec.hidden_size * 4
    assert spec_weight_bytes(spec, torch.float32) < spec_weight_bytes(untied, torch.float32) + table
    decoder = build(spec, source)
    assert decoder.choices["tied_embedding"].version.name == "native"
    assert "head" not in decoder.choices


def test_weights_are_read_once_each() -> None:
    spec, source = tiny("qwen3_moe")
    asked: list[str] = []
    plain = source.get
    source.get = lambda name, **options: (asked.append(name), plain(name, **options))[1]  # type: ignore[method-assign]
    build(spec, source)
    assert sorted(asked) == sorted(source.names())


def test_random_weights_of_a_shape(tmp_path: Path) -> None:
    import json

    config = {**CASES["qwen3"][1], "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    files = resolve_model(f"random:{tmp_path / 'config.json'}")
    first = load_decoder(files, device=CPU, dtype=torch.bfloat16, seed=3)
    assert first.num_bytes == weight_bytes(files, torch.bfloat16)
    tokens = list(range(20))
    logits = PagedDriver(first).run(0, tokens, 20)
    assert torch.isfinite(logits).all()
    again = load_decoder(files, device=CPU, dtype=torch.bfloat16, seed=3)
    assert torch.equal(PagedDriver(again).run(0, tokens, 20), logits)
    other = load_decoder(files, device=CPU, dtype=torch.bfloat16, seed=4)
    assert not torch.equal(PagedDriver(other).run(0, tokens, 20), logits)


# --- results do not depend on the batch ---


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", ["llama", "qwen3", "gemma2", "gemma3", "mixtral"])
def test_logits_do_not_depend_on_batch_chunks_or_blocks(case: str, dtype: torch.dtype) -> None:
    spec, source = tiny(case)
    decoder = build(spec, source, dtype=dtype)
    draw = random.Random(case)
    tokens = draw.choices(range(VOCAB), k=100)
    alone = PagedDriver(decoder, block_size=16).run(0, tokens, 100)
    for chunk, block_size in ((1, 16), (33, 4), (7, 5)):
        assert torch.equal(PagedDriver(decoder, block_size).run(0, tokens, chunk), alone)
    driver, done, parts = PagedDriver(decoder, block_size=8), 0, []
    while done < len(tokens):
        count = min(draw.choice((1, 1, 3, 30)), len(tokens) - done)
        rows = [(other, draw.choices(range(VOCAB), k=draw.choice((1, 1, 9)))) for other in range(1, draw.randint(2, 9))]
        place = draw.randint(0, len(rows))
        rows.insert(place, (0, tokens[done : done + count]))
        parts.append(driver.step(rows)[place])
        done += count
    assert torch.equal(torch.cat(parts), alone)


def test_the_default_model_loads_with_the_predicted_bytes() -> None:
    files = resolve_model("smollm2-135m-instruct")
    decoder = load_decoder(files, device=CPU, dtype=torch.bfloat16)
    assert decoder.num_bytes == weight_bytes(files, torch.bfloat16) == 96_576_896
    assert decoder.spec.num_layers == 30
    hidden_rows = PagedDriver(decoder, block_size=16).run(0, [1, 2, 3], 3)
    assert hidden_rows.shape == (3, 49152)
    assert torch.isfinite(hidden_rows).all()
