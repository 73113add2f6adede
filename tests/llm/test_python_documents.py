"""Documents that are cached and used at other places of a prompt.

In a model of one layer keys and values depend on nothing but their token and its position, so that reuse is exact: its
answers must be those of a whole prefill. With more layers they are approximate, and nothing of them may stay cached.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers.adapter_files import write_adapter
from helpers.tiny_models import config_of, make_reference

from millrace.errors import BadRequest
from millrace.llm import LLM

TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}>"
    "{% if message.content is string %}{{ message.content }}"
    "{% else %}{% for part in message.content %}{{ part.text }}\n\n{% endfor %}{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
TEXTS = [
    "The mill was built in 1742 by a carpenter. Its wheel turns eight times a minute, and its beams are oak.",
    "A millrace is the narrow channel that leads water to the wheel; this one is a hundred and twenty metres long.",
    "The bakery opens at six in the morning. It sells rye bread on Mondays, and on Thursdays if flour is left over.",
]
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 12, "ignore_eos": True}


def opened(folder: Path, num_layers: int, **options: Any) -> LLM:
    sizes = {"vocab_size": 300, "max_position_embeddings": 2048, "num_hidden_layers": num_layers}
    (folder / "config.json").write_text(json.dumps({**config_of(make_reference("llama")), **sizes}))
    (folder / "template.jinja").write_text(TEMPLATE)
    settings: dict[str, Any] = {"dtype": "float32", "kv_tokens": 4096, **options}
    return LLM(f"random:{folder}/config.json", device="cpu", chat_template=str(folder / "template.jinja"), **settings)


@pytest.fixture(scope="module")
def one_layer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    with opened(tmp_path_factory.mktemp("one"), 1, token_budget=48) as llm:
        yield llm


@pytest.fixture(scope="module")
def three_layers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    with opened(tmp_path_factory.mktemp("three"), 3) as llm:
        yield llm


def conversation(order: list[int], recompute: float | None, before: str = "Read this.") -> list[dict[str, Any]]:
    """`recompute`: None marks nothing."""
    parts: list[dict[str, Any]] = [{"type": "text", "text": before}]
    for index in order:
        mark = {} if recompute is None else {"cache": {"type": "document", "recompute": recompute}}
        parts.append({"type": "text", "text": TEXTS[index], **mark})
    return [{"role": "system", "content": parts}, {"role": "user", "content": "Who built it?"}]


@pytest.mark.parametrize(("order", "recompute"), [([0, 1, 2], 0.0), ([2, 0], 0.15), ([1, 1], 0.5)])
def test_reuse_in_one_layer_is_exact(one_layer: LLM, order: list[int], recompute: float) -> None:
    before = f"Read {order} {recompute}."  # Another prefix each time, so that nothing else is reused.
    reused = one_layer.chat(conversation(order, recompute, before), **GREEDY)
    whole = one_layer.chat(conversation(order, None, before), **GREEDY)
    assert reused.token_ids == whole.token_ids
    lengths = [len(TEXTS[index]) for index in order]  # A token is a byte here.
    assert sum(lengths) * (1 - recompute) - 32 * len(order) < reused.document_tokens <= sum(lengths)
    assert reused.document_tokens > 0 == whole.document_tokens


def test_reuse_goes_with_other_features(tmp_path: Path) -> None:
    """Drafts, log-probabilities, grammars, several answers, few blocks and chunks smaller than a gap."""
    with opened(tmp_path, 1, token_budget=32, kv_tokens=1024, speculate="ngram") as llm:
        for options in ({"logprobs": 2}, {"regex": "[a-d]{12}"}, {"n": 2, "temperature": 1.0, "seed": 3}):
            asked = {**GREEDY, "ignore_eos": "regex" not in options, **options}
            before = f"Read {list(options)}."
            reused, whole = (llm.chat(conversation([2, 1], recompute, before), **asked) for recompute in (0.1, None))
            assert reused.document_tokens > 100
            assert [one.token_ids for one in reused.choices] == [one.token_ids for one in whole.choices]


def test_approximate_blocks_never_enter_the_prefix_cache(three_layers: LLM) -> None:
    def ask(recompute: float | None) -> tuple[list[float], int, int]:
        messages = conversation([2, 1, 0], recompute, "Study that.")
        found = three_layers.chat(messages, **GREEDY, logprobs=0)
        return [one.logprob for one in found.choices[0].logprobs or ()], found.document_tokens, found.cached_tokens

    reused, num_reused, _ = ask(0.0)
    assert num_reused > 200
    assert ask(0.0)[:2] == (reused, num_reused)
    exact, _, num_cached = ask(None)
    assert num_cached < 48, "only the exact beginning was cached"
    assert exact != reused, "this model shows the difference"
    assert ask(0.0)[:2] == (exact, 0), "an exact prefix goes before documents"


def test_what_does_not_go_with_documents_is_refused(three_layers: LLM) -> None:
    with pytest.raises(BadRequest, match="log-probabilities of the prompt"):
        three_layers.chat(conversation([0], 0.1), max_tokens=1, prompt_logprobs=0)
    with pytest.raises(BadRequest, match="recompute is 2"):
        three_layers.chat(conversation([0], 2.0), max_tokens=1)
    with pytest.raises(BadRequest, match="at most 64"):
        three_layers.chat(conversation([0] * 65, 0.1), max_tokens=1)


def test_engines_that_cannot_place_tokens_say_so(tmp_path: Path) -> None:
    with (
        opened(tmp_path, 1, prefix_cache=False) as llm,
        pytest.raises(BadRequest, match="--prefix-cache"),
    ):
        llm.chat(conversation([0], 0.1), max_tokens=1)


def same_as_whole(llm: LLM, before: str, **options: Any) -> list[int]:
    """The answer with two documents reused, which is that of a whole prefill: the model has one layer."""
    asked = {**GREEDY, **options}
    reused, whole = (llm.chat(conversation([2, 1], recompute, before), **asked) for recompute in (0.1, None))
    assert reused.document_tokens > 100
    assert reused.token_ids == whole.token_ids
    return list(reused.token_ids)


@pytest.mark.live
def test_reuse_goes_with_adapters(tmp_path: Path) -> None:
    """Documents are computed with the adapter, whose keys and values are its own."""
    model = make_reference("llama", vocab_size=300, max_position_embeddings=2048, num_hidden_layers=1)
    path = write_adapter(tmp_path / "adapter", model, rank=4, size=1.5)
    with opened(tmp_path, 1, adapters=f"own={path}") as llm:
        assert same_as_whole(llm, "Read.", adapter="own") != same_as_whole(llm, "Read."), "without effect: no proof"


@pytest.mark.live
def test_reuse_goes_with_ranks(tmp_path: Path) -> None:
    """Every rank copies its own heads."""
    with opened(tmp_path, 1, tensor_parallel=2) as llm:
        same_as_whole(llm, "Read.")
