"""A changed config.json means what it means to `transformers`, or is refused: no key of it is ignored.

`make fuzz TESTS=tests/models/test_config_changes.py` tries all changes; otherwise a few of each family, chosen by the
seed."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from helpers.paged import PagedDriver
from helpers.suite import FUZZ, SEED
from helpers.tiny_models import CASES, VOCAB, StateDictSource, config_of, make_reference

from millrace.errors import ModelError
from millrace.models.load import build_decoder
from millrace.models.spec.families import spec_from_config

CHANGES = 2
"""Of each case, unless all are tried."""
NEUTRAL = frozenset(
    (
        *("vocab_size", "model_type", "dtype", "bos_token_id", "eos_token_id", "pad_token_id", "use_cache"),
        *("initializer_range", "max_position_embeddings", "output_router_logits", "router_aux_loss_coef"),
        *("attention_dropout", "embedding_dropout", "router_jitter_noise", "aux_loss_alpha", "seq_aux"),
        *("output_attentions", "output_hidden_states", "return_dict", "chunk_size_feed_forward", "is_encoder_decoder"),
        *("pretraining_tp", "mamba_chunk_size", "time_step_min", "time_step_max", "time_step_floor"),
    )
)
"""Keys without a meaning for the logits, or whose change needs other test data."""
UNUSED_THERE = {("gemma3", "attn_logit_softcapping"), ("gemma", "hidden_act")}
"""What `transformers` reads and does not use; Gemma's activation is not what its published configs say."""
ACTIVATIONS = ("gelu", "relu", "silu", "gelu_pytorch_tanh", "relu2", "quick_gelu")
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
ROPES: tuple[dict[str, Any], ...] = (
    {"rope_type": "default"},
    {"rope_type": "linear", "factor": 2.5},
    {"rope_type": "dynamic", "factor": 2.5},
    {**YARN, "attention_factor": 1.3, "beta_slow": 2.0},
    YARN,
    LLAMA3,
)


def values_instead(key: str, value: Any) -> list[Any]:
    if key in NEUTRAL or key.startswith("_"):
        return []
    if key.endswith(("_act", "activation")):
        return [one for one in ACTIVATIONS if one != value]
    if key == "sliding_window":
        return [one for one in (None, 3, 9) if one != value]
    match value:
        case bool():
            return [not value]
        case int():
            return [value + 1, max(1, 2 * value), max(0, value - 1)]
        case float():
            return [1.7 * value + 0.1]
        case None:
            return [1, 0.5, True]
        case {"rope_theta": theta}:
            # Where the family rotates whole heads, `transformers` ignores the share that rotates.
            share = value.get("partial_rotary_factor")
            kept = {"partial_rotary_factor": share} if share else {}
            halved = [{**value, "partial_rotary_factor": 0.5}] if kept else []
            return [*({"rope_theta": theta, **kept, **rope} for rope in ROPES), *halved]
        case [str() | int(), *_]:
            return [value[::-1], value[:1] * len(value)]
    return []


def changes_of(case: str) -> list[tuple[str, Any]]:
    config = config_of(make_reference(case))
    found = [(key, new) for key, value in config.items() for new in values_instead(key, value)]
    found = [one for one in found if (case, one[0]) not in UNUSED_THERE]
    return found if FUZZ else random.Random(f"{SEED} {case}").sample(found, CHANGES)


def changed_models(case: str) -> Iterator[tuple[str, Any]]:
    """Models whose config `transformers` accepts."""
    for key, value in changes_of(case):
        try:
            model = make_reference(case, **{key: value})
            with torch.no_grad():
                model(torch.tensor([[1, 2, 3]]))
        except Exception:  # of any kind: what it refuses is not ours to read
            continue
        yield f"{key}={value!r}", model


@pytest.mark.parametrize("case", CASES)
def test_a_changed_config_is_honoured_or_refused(case: str) -> None:
    tokens = random.Random(SEED).choices(range(VOCAB), k=26)
    for change, model in changed_models(case):
        with torch.no_grad():
            theirs = model(torch.tensor([tokens])).logits[0]
        try:
            spec = spec_from_config(config_of(model))
            decoder = build_decoder(spec, StateDictSource.of(model), device=torch.device("cpu"), dtype=torch.float32)
        except ModelError:
            continue
        if bool(theirs.isfinite().all()):
            ours = PagedDriver(decoder, block_size=4).run(0, tokens, chunk=5)
            torch.testing.assert_close(ours, theirs, atol=2e-4, rtol=2e-4, msg=f"{case} with {change}")
