"""Every family's logits against `transformers`, through the paged cache: whole, in chunks, in mixed batches."""

from __future__ import annotations

import random

import pytest
import torch
from helpers.inside import without_compiler
from helpers.paged import PagedDriver
from helpers.tiny_models import CASES, VOCAB, StateDictSource, config_of, make_reference

from millrace.models.decoder import Decoder
from millrace.models.load import build_decoder
from millrace.models.spec.families import spec_from_config

CPU = torch.device("cpu")
TOLERANCE = 1e-4


def load(case: str, dtype: torch.dtype = torch.float32) -> tuple[torch.nn.Module, Decoder]:
    model = make_reference(case)
    spec = spec_from_config(config_of(model))
    return model, build_decoder(spec, StateDictSource.of(model), device=CPU, dtype=dtype)


def tokens_of(length: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(VOCAB), k=length)


def reference_logits(model: torch.nn.Module, tokens: list[int]) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = model(torch.tensor([tokens])).logits[0]
    return logits


def check(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    torch.testing.assert_close(ours, theirs, atol=TOLERANCE, rtol=TOLERANCE)
    assert torch.equal(ours.argmax(-1), theirs.argmax(-1))


@pytest.mark.parametrize("case", CASES)
def test_whole_prompt_and_chunks(case: str) -> None:
    model, decoder = load(case)
    tokens = tokens_of(23)
    theirs = reference_logits(model, tokens)
    for sequence, chunk in enumerate((23, 1, 2, 3, 7, 16)):
        driver = PagedDriver(decoder, block_size=(4, 1, 3, 16, 5, 7)[sequence], seed=sequence)
        check(driver.run(0, tokens, chunk), theirs)


@pytest.mark.parametrize("case", CASES)
def test_mixed_batches(case: str) -> None:
    check_mixed_batches(case)


@pytest.mark.parametrize("case", CASES)
def test_mixed_batches_without_a_compiler(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    without_compiler(monkeypatch)
    check_mixed_batches(case)


def check_mixed_batches(case: str) -> None:
    """Sequences that arrive at different times: steps mix long chunks, short ones and single tokens."""
    model, decoder = load(case)
    draw = random.Random(case)
    texts = [tokens_of(length, seed=length) for length in (31, 9, 17, 1, 40, 2)]
    driver = PagedDriver(decoder, block_size=5)
    done = [0] * len(texts)
    found: list[list[torch.Tensor]] = [[] for _ in texts]
    while any(count < len(text) for count, text in zip(done, texts, strict=True)):
        ready = [index for index, text in enumerate(texts) if done[index] < len(text)]
        chosen = draw.sample(ready, draw.randint(1, len(ready)))
        counts = [min(draw.choice((1, 1, 1, 4, 13)), len(texts[index]) - done[index]) for index in chosen]
        rows = [
            (index, texts[index][done[index] : done[index] + count])
            for index, count in zip(chosen, counts, strict=True)
        ]
        for index, count, logits in zip(chosen, counts, driver.step(rows), strict=True):
            found[index].append(logits)
            done[index] += count
    for text, parts in zip(texts, found, strict=True):
        check(torch.cat(parts), reference_logits(model, text))


@pytest.mark.parametrize("case", ["llama", "gemma2", "gemma3", "qwen3_moe", "cohere2", "gpt_neox", "nemotron"])
def test_greedy_generation_agrees(case: str) -> None:
    model, decoder = load(case)
    tokens = tokens_of(6)
    theirs, ours = list(tokens), list(tokens)
    for _ in range(20):
        theirs.append(int(reference_logits(model, theirs)[-1].argmax()))
    driver = PagedDriver(decoder)
    logits = driver.run(0, ours, chunk=4)
    for _ in range(20):
        ours.append(int(logits[-1].argmax()))
        logits = driver.run(0, ours[-1:], chunk=1)
    assert ours == theirs


@pytest.mark.parametrize("case", CASES)
def test_bfloat16_stays_close(case: str) -> None:
    """bfloat16 carries 8 bits: after a few layers the logits agree to a few percent of their spread."""
    model, decoder = load(case, torch.bfloat16)
    tokens = tokens_of(30)
    theirs = reference_logits(model.to(torch.bfloat16).float(), tokens)
    ours = PagedDriver(decoder, block_size=4).run(0, tokens, chunk=8)
    assert ours.dtype == torch.float32
    errors = (ours - theirs).norm(dim=-1) / theirs.norm(dim=-1)
    # A token that two experts suit equally may go to the other one; a state carries what earlier tokens rounded.
    if decoder.spec.moe is not None or decoder.spec.recurrent is not None:
        assert errors.median() < 0.08, f"median relative error {errors.median():.4f}"
        return
    assert errors.median() < 0.03, f"median relative error {errors.median():.4f}"
    assert errors.max() < 0.1, f"largest relative error {errors.max():.4f}"


@pytest.mark.parametrize("case", ["llama", "qwen3", "gemma2", "mixtral"])
def test_float16_stays_close(case: str) -> None:
    model, decoder = load(case, torch.float16)
    tokens = tokens_of(30)
    theirs = reference_logits(model, tokens)
    ours = PagedDriver(decoder, block_size=4).run(0, tokens, chunk=8)
    assert (ours - theirs).norm() / theirs.norm() < 0.01
