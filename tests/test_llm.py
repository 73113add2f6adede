"""The offline interface: errors about keyword arguments, and reprs that fit on a line."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np
import pydantic
import pytest
import torch
from helpers.tiny_models import config_of, make_reference

from millrace.errors import BadRequest, ConfigError, RequestFailed
from millrace.llm import LLM, Choice, Generation
from millrace.params.defaults import SamplingDefaults
from millrace.params.grammar import MAX_GRAMMAR_BYTES, ThinkingLimit
from millrace.params.sampling import SamplingParams
from millrace.text.grammar.python_types import grammar_of


@pytest.mark.parametrize(
    ("keywords", "says"),
    [
        ({"dtpye": "float32"}, r"LLM\(\) has no keyword argument 'dtpye'\. Did you mean 'dtype'\?"),
        ({"zzzzzzzz": 1}, r"LLM\(\) has no keyword argument 'zzzzzzzz'\. `millrace config` lists all settings\."),
        ({"dtype": "int3"}, r"LLM\(\): keyword argument 'dtype' is 'int3'; it must be one of auto, float32"),
        ({"kv_tokens": 1.5}, r"LLM\(\): keyword argument 'kv_tokens' is 1\.5; it must be a whole number of at least 0"),
    ],
)
def test_error_names_the_keyword_argument(keywords: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError, match=says) as raised:
        LLM(**keywords)
    assert "command line" not in str(raised.value)


def test_reprs_of_outputs_are_short() -> None:
    choice = Choice(0, "a" * 500, list(range(500)), "stop", "END")
    assert repr(choice) == (
        f"Choice(index=0, text='{'a' * 59}…', num_tokens=500, finish_reason='stop', stopped_by='END')"
    )
    generation = Generation(list(range(1000)), [choice], cached_tokens=16)
    assert repr(generation) == f"Generation(num_prompt_tokens=1000, cached_tokens=16, choices=[{choice!r}])"


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    path = tmp_path_factory.mktemp("random") / "config.json"
    path.write_text(json.dumps(config_of(make_reference("llama"))))
    with LLM(f"random:{path}", device="cpu", dtype="float32", kv_tokens=128) as opened:
        yield opened


@pytest.mark.parametrize(
    ("keywords", "says"),
    [
        ({"max_token": 4}, r"generate\(\) has no keyword argument 'max_token'\. Did you mean 'max_tokens'\?"),
        ({"temperature": 101.0}, r"temperature is 101"),
        ({"temperature": "hot"}, r"generate\(\): temperature has the wrong type: 'hot'\. Give a number"),
        ({"max_tokens": 5.5}, r"max_tokens has the wrong type: 5\.5\. Give an integer or None"),
        ({"top_k": 1.5}, "top_k has the wrong type"),
        ({"n": True}, "n has the wrong type: True"),
        ({"stop": 5}, r"stop has the wrong type: 5\. Give a list"),
        ({"stop": ["a", 5]}, r"stop \(at \[1\]\) has the wrong type: \['a', 5\]\. Give a string"),
        ({"stop_token_ids": [1.5]}, "stop_token_ids"),
        ({"logit_bias": {"a": 1}}, "logit_bias"),
        ({"logit_bias": {5: 500}}, "logit_bias of token 5 is 500"),
        ({"pooled_from": 1}, "no keyword argument 'pooled_from'"),
        ({"params": SamplingParams(), "seed": 1}, r"given SamplingParams and the keyword argument 'seed'; give one"),
    ],
)
def test_sampling_errors_name_the_keyword_argument(llm: LLM, keywords: dict[str, Any], says: str) -> None:
    with pytest.raises(BadRequest, match=says):
        llm.generate("ab", **keywords)


def test_keywords_are_sampling_parameters(llm: LLM) -> None:
    (short,) = llm.generate("ab", max_tokens=3, ignore_eos=True, temperature=0)
    (same,) = llm.generate("ab", SamplingParams(max_tokens=3, ignore_eos=True, temperature=0))
    assert short.token_ids == same.token_ids
    assert len(short.token_ids) == 3
    (stopped,) = llm.generate("ab", max_tokens=2, ignore_eos=True, stop="never drawn")
    assert len(stopped.token_ids) == 2


def test_numbers_of_numpy_and_keys_of_json_are_taken(llm: LLM) -> None:
    fields: dict[str, Any] = {"ignore_eos": True, "temperature": np.float32(0)}
    (plain,) = llm.generate("ab", max_tokens=3, logit_bias={7: 100.0}, **fields)
    (same,) = llm.generate("ab", max_tokens=np.int64(3), logit_bias={"7": np.float64(100)}, **fields)
    assert plain.token_ids == same.token_ids == [7, 7, 7]


def test_stream_in_plain_and_asynchronous_code(llm: LLM) -> None:
    fields: dict[str, Any] = {"max_tokens": 5, "ignore_eos": True, "temperature": 0}
    (whole,) = llm.generate("ab", **fields)
    plain = [part.token_id for part in llm.stream("ab", **fields)]
    assert plain == [*whole.token_ids, None]
    assert llm.stream("ab", **fields).text() == whole.text

    async def collect() -> list[int | None]:
        return [part.token_id async for part in llm.stream("ab", **fields)]

    assert asyncio.run(collect()) == plain


def test_leaving_a_stream_early_frees_its_row(llm: LLM) -> None:
    for part in llm.stream("ab", max_tokens=110, ignore_eos=True):
        assert part.token_id is not None
        break
    (after,) = llm.generate("ab", max_tokens=110, ignore_eos=True)  # Needs nearly every KV block.
    assert len(after.token_ids) == 110


def test_model_defaults_fill_what_a_call_leaves_out(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llm, "sampling_defaults", SamplingDefaults(temperature=0.0))
    first, second = (llm.generate("ab", max_tokens=8, ignore_eos=True)[0].token_ids for _ in range(2))
    assert first == second
    assert first == llm.generate("ab", max_tokens=8, ignore_eos=True, temperature=0)[0].token_ids


class Point(msgspec.Struct):
    x: Literal[1, 2]
    y: bool


class PointModel(pydantic.BaseModel):
    x: Literal[1, 2]
    y: bool


def check_constrained(llm: LLM) -> None:
    """Answers of a model that knows nothing."""
    limit = SamplingParams(max_tokens=60, seed=1)
    schema = msgspec.json.schema(Point)
    schema["$defs"]["Point"]["additionalProperties"] = False
    for described in (schema, json.dumps(schema), Point, PointModel):
        for generation in llm.generate(["ab", "ba"], limit, schema=described):
            assert generation.choices[0].finish_reason == "stop"
            msgspec.json.decode(generation.text, type=Point)
    assert llm.generate("ab", limit, choice=["yes", "no"])[0].text in ("yes", "no")
    assert re.fullmatch("[ab]{3}", llm.generate("ab", limit, regex="[ab]{3}")[0].text)
    assert llm.generate("ab", limit, grammar='root ::= "a" "b"')[0].text == "ab"
    with pytest.raises(BadRequest, match="'not'"):
        llm.generate("ab", limit, schema={"not": {}})


PATHOLOGICAL: list[dict[str, Any]] = [
    {"schema": {"enum": [f"value {number}" for number in range(8000)]}},
    {"schema": {"type": "object", "properties": {f"p{number}": {"type": "null"} for number in range(3000)}}},
    {"schema": {"type": "array", "items": {"$ref": "#"}, "minItems": 1_000_000}},
    {"schema": {"allOf": [{"anyOf": [{"required": [f"{i}-{j}"]} for j in range(10)]} for i in range(10)]}},
    {"regex": "(a+)+$"},
    {"regex": "(.*a.{20})|(.*b.{20})|(.*c.{20})"},
    {"grammar": 'start: s\ns: s s s s | "a" | "" | s "b"'},
    {"grammar": 'start: a{1000}\na: b{1000}\nb: c{1000}\nc: "x"'},
]


def check_neighbours(llm: LLM) -> None:
    """Grammars that cost much cost their senders an error or a wait. A stream beside them goes on as it would alone."""
    fields: dict[str, Any] = {"max_tokens": 100, "ignore_eos": True, "temperature": 0}
    (alone,) = llm.generate("ab", **fields)

    def send(given: dict[str, Any]) -> bool:
        with contextlib.suppress(BadRequest, RequestFailed):
            llm.generate("ba", max_tokens=10, **given)
        return True

    with ThreadPoolExecutor(len(PATHOLOGICAL)) as pool:
        senders = [pool.submit(send, given) for given in PATHOLOGICAL]
        rounds = 0
        while rounds < 3 or not all(sender.done() for sender in senders):
            rounds += 1
            assert [part.token_id for part in llm.stream("ab", **fields)] == [*alone.token_ids, None]
        assert all(sender.result(60) for sender in senders)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"schema": {}, "regex": "a"}, "'schema' and 'regex' both"),
        ({"schema": ThreadPoolExecutor}, "describes no JSON"),
        ({"choice": "yes"}, "choice is of type str; give a list"),
        ({"choice": ["x" * MAX_GRAMMAR_BYTES]}, "list of choices has"),
    ],
)
def test_what_describes_no_answer_is_refused(arguments: dict[str, Any], says: str) -> None:
    with pytest.raises(BadRequest, match=says):
        grammar_of(**arguments)


def test_reasoning_ends_at_its_limit(llm: LLM) -> None:
    free = llm.generate([[1, 2, 3]], SamplingParams(max_tokens=8, temperature=0, ignore_eos=True))[0].token_ids
    end = next(token for token in range(3, 60) if token not in free)
    limit = ThinkingLimit(max_tokens=3, start_id=2, end_id=end, is_open=True)
    params = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True, thinking=limit)
    held = llm.generate([[1, 2, 3]], params)[0].token_ids
    assert held[:4] == [*free[:3], end]
    assert len(held) == 8
    assert held.count(end) < 5


def test_repr_names_model_and_device_until_it_is_closed(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**config_of(make_reference("llama")), "vocab_size": 300}))
    source = f"random:{path}"
    with LLM(source, device="cpu", dtype="float32", kv_tokens=512) as llm:
        assert repr(llm).startswith(f"LLM('{source}', device='cpu")
        assert "dtype='float32'" in repr(llm)
        (generation,) = llm.generate("ab", SamplingParams(max_tokens=3, ignore_eos=True))
        assert "num_tokens=3" in repr(generation)
        check_constrained(llm)
        check_neighbours(llm)
    assert repr(llm) == f"LLM('{source}', closed)"


def test_embeddings_are_of_length_one_and_close_for_equal_meanings() -> None:
    texts = ["The cat sits on the mat.", "A cat is sitting on a mat.", "Interest rates rose by a quarter of a point."]
    with LLM(dtype="float32", token_budget=5) as llm:
        last, mean = llm.embed(texts), llm.embed(texts, pooling="mean")
        short = llm.embed(texts[0], dimensions=8)[0]
        with pytest.raises(BadRequest, match="dimensions"):
            llm.embed("x", dimensions=0)
        with pytest.raises(BadRequest, match="no tokens"):
            llm.embed([[]])
    for vectors in (last, mean):
        assert [float(np.linalg.norm(vector)) for vector in vectors] == pytest.approx([1.0] * 3, abs=1e-5)
        assert vectors[0] @ vectors[1] > vectors[0] @ vectors[2]
    assert short == pytest.approx(last[0][:8] / np.linalg.norm(last[0][:8]))


def test_a_closed_engine_leaves_no_tensors(tmp_path: Path) -> None:
    """Without the garbage collector's own rounds, which come at some later time or never."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config_of(make_reference("llama"))))
    left = []
    gc.collect()
    gc.disable()
    try:
        for _ in range(2):
            with LLM(f"random:{path}", device="cpu", dtype="float32", kv_tokens=512) as opened:
                opened.generate([[40, 41]], max_tokens=4, temperature=0.0)
                open_bytes = tensor_bytes()
            left.append(tensor_bytes())
    finally:
        gc.enable()
    assert left[1] == left[0] < open_bytes


def tensor_bytes() -> int:
    """Bytes of all tensors of this process, each storage once."""
    storages = {}
    for one in gc.get_objects():
        if issubclass(type(one), torch.Tensor):  # Some modules answer `isinstance` with a warning.
            storages[one.untyped_storage().data_ptr()] = one.untyped_storage().nbytes()
    return sum(storages.values())
