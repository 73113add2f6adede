"""`LLM.chat` and its kin: parsed answers, checks like those over HTTP, reprs, scores, orders, and the end."""

from __future__ import annotations

import asyncio
import dataclasses
import inspect
import math
import re
import warnings
from pathlib import Path
from typing import Any, Literal

import msgspec
import pydantic
import pytest

import millrace
from millrace.errors import BadRequest, EngineUnavailable, RequestFailed
from millrace.link.messages import EngineLoading
from millrace.llm import LLM, AsyncLLM, Choice, Generation, llm
from millrace.params.sampling import SamplingParams


class Point(msgspec.Struct):
    x: Literal[1, 2]
    y: bool


class PointModel(pydantic.BaseModel):
    x: Literal[1, 2]
    y: bool


@dataclasses.dataclass
class PointData:
    x: Literal[1, 2]
    y: bool


LIMIT = SamplingParams(max_tokens=60, seed=1)


@pytest.mark.parametrize("kind", [Point, PointModel, PointData])
def test_parsed_is_an_object_of_the_schema(tiny: LLM, kind: type[Any]) -> None:
    found = tiny.chat("Where?", LIMIT, schema=kind)
    assert isinstance(found.parsed, kind)
    assert found.parsed.x in (1, 2)
    (generated,) = tiny.generate("Where?", LIMIT, schema=kind)
    assert isinstance(generated.parsed, kind)
    pair = tiny.chat("Where?", LIMIT, schema=tuple[kind, kind]).parsed
    assert isinstance(pair, tuple)
    assert all(isinstance(one, kind) for one in pair)


def test_parsed_of_a_dictionary_and_without_a_schema(tiny: LLM) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": [1]}}, "required": ["a"], "additionalProperties": False}
    assert tiny.chat("?", LIMIT, schema=schema).parsed == {"a": 1}
    assert tiny.chat("?", max_tokens=2).parsed is None


def test_parsed_of_an_answer_that_was_cut_says_so(tiny: LLM) -> None:
    cut = tiny.chat("?", max_tokens=1, schema=Point)
    assert cut.finish_reason == "length"
    with pytest.raises(RequestFailed, match="max_tokens ended it"):
        _ = cut.parsed


@pytest.mark.parametrize(
    ("messages", "says"),
    [
        (
            [{"role": "usr", "content": "x"}],
            r"'messages\[0\].role' is .usr.; it must be one of system, developer, user",
        ),
        ([{"role": "user", "content": "x", "nmae": "y"}], "nmae"),
        ([{"role": "user"}], "content"),
        ([{"role": "user", "content": 5}], "content"),
        ([{"role": "user", "content": object()}], "not JSON"),
        ([], "messages' is empty"),
        (5, "messages are of type int; give a text or a list of messages"),
        (["hi"], r"messages\[0\] is of type str"),
        ({"role": "user", "content": "x"}, "one dictionary; give a list"),
    ],
)
def test_messages_are_checked_as_over_http(tiny: LLM, messages: Any, says: str) -> None:
    for method in (tiny.chat, tiny.stream_chat, tiny.encode_chat):
        with pytest.raises(BadRequest, match=says):
            method(messages)


@pytest.mark.parametrize("prompts", [5, None, [None], ["a", 5], [1.5], b"ab", [[1, "a"]]])
def test_prompts_of_other_types_are_refused(tiny: LLM, prompts: Any) -> None:
    with pytest.raises(BadRequest, match="give each prompt as a string or a list of token ids"):
        tiny.generate(prompts)


def test_reprs_name_attributes_that_exist(tiny: LLM) -> None:
    found = tiny.chat([{"role": "user", "content": "Hello"}], max_tokens=2)
    for shown in (tiny, found, dataclasses.replace(found.choices[0], text="")):
        outside_of_lists = re.sub(r"\[.*\]", "[]", repr(shown))
        names = re.findall(r"(\w+)=", outside_of_lists)
        assert len(names) >= 3
        for name in names:
            assert hasattr(shown, name), name
    assert found.num_prompt_tokens == len(found.prompt_token_ids)
    assert (found.num_tokens, found.finish_reason) == (2, "length")
    assert Choice(0, token_ids=[1, 2]).num_tokens == 2
    assert Generation([1], [Choice(0)]).num_prompt_tokens == 1


def test_the_package_lists_what_it_offers() -> None:
    assert {"LLM", "AsyncLLM", "SamplingParams", "Generation"} <= set(dir(millrace))
    assert "TYPE_CHECKING" not in dir(millrace)
    for name in millrace.__all__:
        assert getattr(millrace, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'LMM'"):
        _ = millrace.LMM  # type: ignore[attr-defined]


def test_the_conversation_can_be_continued(tiny: LLM) -> None:
    first = tiny.chat([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}], max_tokens=3)
    assert [message["role"] for message in first.messages] == ["system", "user", "assistant"]
    second = tiny.chat([*first.messages, {"role": "user", "content": "And?"}], max_tokens=3)
    assert second.cached_tokens > 0
    assert len(second.messages) == 5


def test_scores_are_log_probabilities(tiny: LLM) -> None:
    """The probabilities of all tokens after a prompt add up to 1."""
    one, two = tiny.score("ab", ["c", "cd"])
    assert (one.num_tokens, two.num_tokens) == (1, 2)
    assert one.logprob == pytest.approx(two.token_logprobs[0], abs=1e-4)
    assert two.logprob == pytest.approx(sum(two.token_logprobs))
    assert two.mean_logprob == pytest.approx(two.logprob / 2)
    every = tiny.score("ab", [chr(code) for code in range(32, 127)])
    assert 0.0 < sum(math.exp(score.logprob) for score in every) < 1.0
    likeliest = max(every, key=lambda score: score.logprob)
    drawn = tiny.generate("ab", max_tokens=1, temperature=0, logprobs=0)[0].choices[0]
    assert drawn.logprobs is not None
    assert drawn.logprobs[0].logprob >= likeliest.logprob - 1e-4
    with pytest.raises(BadRequest, match="no tokens"):
        tiny.score("ab", "")


@pytest.mark.parametrize("by", ["embedding", "yes_no"])
def test_documents_are_ordered_by_what_was_asked_for(tiny: LLM, by: Any) -> None:
    documents = ["the sea is blue", "cats sleep", "1 + 1"]
    found = tiny.rerank("the sea is blue", documents, by=by)
    assert sorted(one.index for one in found) == [0, 1, 2]
    assert [one.document for one in found] == [documents[one.index] for one in found]
    assert [one.score for one in found] == sorted((one.score for one in found), reverse=True)
    if by == "embedding":
        assert (found[0].index, found[0].score) == (0, pytest.approx(1.0, abs=1e-3))
    else:
        assert all(0 <= one.score <= 1 for one in found)


def test_a_model_that_was_not_trained_to_embed_says_so(tiny: LLM) -> None:
    with pytest.warns(UserWarning, match="not trained for embeddings"):
        tiny.embed("the sea")


def test_rerank_without_a_reranker_says_what_would_work(tiny: LLM) -> None:
    with pytest.raises(BadRequest, match="trained neither to rerank nor to embed. by='embedding' orders"):
        tiny.rerank("q", ["a"])
    with pytest.raises(BadRequest, match="does not know by='cross'"):
        tiny.rerank("q", ["a"], by="cross")  # type: ignore[arg-type]
    with pytest.raises(BadRequest, match="not a list of texts"):
        tiny.rerank("q", "a", by="embedding")


def random_model(folder: Path) -> str:
    from helpers.tiny_models import config_of, make_reference

    folder.joinpath("config.json").write_text(msgspec.json.encode(config_of(make_reference("llama"))).decode())
    return f"random:{folder}/config.json"


def test_a_closed_model_says_so(tmp_path: Path) -> None:
    with LLM(random_model(tmp_path), device="cpu", dtype="float32", kv_tokens=128) as opened:
        stream = opened.stream("ab", max_tokens=2)

    async def iterate() -> None:
        async for _ in opened.stream("ab"):
            pass

    async def ask() -> None:
        await opened.run(opened.calls.score("ab", "c"))

    with warnings.catch_warnings():
        warnings.simplefilter("error")  # Coroutines that are never awaited.
        for call in (
            lambda: opened.generate("ab"),
            lambda: opened.embed("ab"),
            lambda: opened.score("ab", "c"),
            lambda: list(stream),
            lambda: asyncio.run(iterate()),
            lambda: asyncio.run(ask()),
        ):
            with pytest.raises(EngineUnavailable, match="This LLM is closed"):
                call()
        opened.close()  # Once more does nothing.


def test_loading_shows_its_stages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    source = random_model(tmp_path)
    settings: dict[str, Any] = {"device": "cpu", "dtype": "float32", "kv_tokens": 128}
    monkeypatch.setattr(llm, "is_watched", lambda: True)
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    with LLM(source, **settings):
        assert "weights" in capfd.readouterr().err
    stages: list[EngineLoading] = []
    with LLM(source, on_loading=stages.append, **settings), LLM(source, progress=False, **settings):
        assert any("weights" in stage.what for stage in stages)
        assert capfd.readouterr().err == ""


def test_the_async_twin_has_every_method() -> None:
    """With the same parameters: what one can do, the other can."""
    for name, method in inspect.getmembers(LLM, inspect.isfunction):
        if name.startswith("_") or name in ("run", "encode_chat"):
            continue
        twin = inspect.signature(getattr(AsyncLLM, name)).parameters
        if name != "stream_chat":
            assert list(inspect.signature(method).parameters) == list(twin), name


def test_asynchronous_code(tmp_path: Path, tiny: LLM) -> None:
    async def use() -> None:
        closed = AsyncLLM(random_model(tmp_path), device="cpu", dtype="float32", kv_tokens=512)
        with pytest.raises(EngineUnavailable, match="not loaded"):
            await closed.generate("ab")
        async with closed as opened:
            assert "device='cpu" in repr(opened)
            one, two = await asyncio.gather(
                opened.generate("ab", max_tokens=3, ignore_eos=True),
                opened.generate("ba", max_tokens=2, ignore_eos=True),
            )
            assert (one[0].num_tokens, two[0].finish_reason) == (3, "length")
            assert len((await opened.embed("ab"))[0]) == 48
            assert (await opened.score("ab", "c"))[0].num_tokens == 1
            assert [one.index for one in await opened.rerank("ab", ["ab"], by="embedding")] == [0]
            assert [part.token_id async for part in opened.stream("ab", max_tokens=1, ignore_eos=True)][-1] is None
        with pytest.raises(EngineUnavailable, match="closed"):
            await opened.embed("ab")

    asyncio.run(use())
