"""Perplexity through the API: equals transformers, is reproducible, and is reported if the server cannot do it."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.fake_openai import FakeServer, running
from helpers.served import Served, serving
from helpers.tiny_models import VOCAB, make_reference
from tokenizers import Tokenizer as Backend
from tokenizers import models, pre_tokenizers, processors

from millrace.bench.figures import Figure
from millrace.bench.http.perplexity import TEXT_FILE, Perplexity, UnsupportedByServer, cut, measure_perplexity
from millrace.bench.http.suite import SuiteOptions, run_remote
from millrace.bench.http.target import Target

pytestmark = pytest.mark.live

WINDOW = 32
TEXT = " ".join(f"w{(7 * i * i + 3 * i) % 90}" for i in range(150))


@pytest.fixture(scope="module")
def reference() -> Any:
    return make_reference("llama")


@pytest.fixture(scope="module")
def served(reference: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("tiny")
    reference.save_pretrained(folder)
    write_tokenizer(folder)
    with serving(str(folder), "--served-name", "tiny") as server:
        yield server


def write_tokenizer(folder: Path) -> None:
    """One token per word, and token 1 before every text."""
    vocabulary = {"<unk>": 0, "<s>": 1, "</s>": 2, **{f"w{i}": i + 3 for i in range(VOCAB - 3)}}
    backend = Backend(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>"}))


def measured(url: str, **options: Any) -> Perplexity:
    async def ask() -> Perplexity:
        async with Target(url) as target:
            await target.find_model()
            return await measure_perplexity(target, **options)

    return asyncio.run(ask())


def test_perplexity_equals_transformers(served: Served, reference: Any) -> None:
    own = [int(word[1:]) + 3 for word in TEXT.split()]
    total = 0.0
    for at in range(0, len(own), WINDOW - 1):
        ids = torch.tensor([[1, *own[at : at + WINDOW - 1]]])
        with torch.no_grad():
            scores = torch.log_softmax(reference(ids).logits.double(), -1)
        total += scores[0, :-1].gather(1, ids[0, 1:, None]).sum().item()
    found = measured(f"http://127.0.0.1:{served.port}", text=TEXT, window=WINDOW)
    assert (found.scored_tokens, found.windows) == (150, 5)
    assert found.value == pytest.approx(math.exp(-total / 150), rel=1e-4)


def test_perplexity_is_reproducible(served: Served) -> None:
    url = f"http://127.0.0.1:{served.port}"
    assert measured(url, text=TEXT, window=WINDOW) == measured(url, text=TEXT, window=WINDOW)


def test_server_without_prompt_logprobs_is_reported(tmp_path: Path) -> None:
    with running(FakeServer()) as server:
        with pytest.raises(UnsupportedByServer, match="returns no prompt log-probabilities"):
            measured(server.url, text=TEXT)
        figures: list[Figure] = []
        options = SuiteOptions((), seed=1, time_limit_s=20.0, perplexity=True)
        asyncio.run(run_remote(Target(server.url), options, figures.append, lambda *_: None))
    assert math.isnan(figures[-1].value)
    assert "returns no prompt log-probabilities" in figures[-1].note
    assert json.loads(figures[-1].as_json())["value"] is None


def test_server_without_tokenize_is_reported() -> None:
    with running(FakeServer(tokenize=False)) as server, pytest.raises(UnsupportedByServer, match="no /tokenize"):
        measured(server.url)


def test_windows_cover_the_text_once() -> None:
    assert cut(list(range(10)), 4) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert cut(list(range(9)), 4) == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_the_text_is_a_few_thousand_tokens_of_plain_prose() -> None:
    words = TEXT_FILE.read_text(encoding="utf-8").split()
    assert 1_800 < len(words) < 4_000
