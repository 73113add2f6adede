"""Calls and reasoning within grammars, on models whose markers are special tokens, other added tokens, or plain text.

A script stands for the model: it has a text in mind, and draws each of its tokens if the grammar's mask allows it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import numpy as np
import pytest
from helpers.marker_shapes import KINDS, SHAPES, tokenizer_of
from serve.front_under_test import MODEL, Front, running_front
from serve.wire import CHAT, events, post
from text.grammar.answers import allowed

from millrace.link.messages import NewRequest
from millrace.text.chat.template import ChatTemplate
from millrace.text.grammar.environment import GrammarEnvironment
from millrace.text.tokenizers.tokenizer import Tokenizer
from millrace.text.tools.written import write_calls

pytestmark = pytest.mark.live

SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "<tool_call>"]}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOL = {"name": "get_weather", "parameters": SCHEMA}
NAMED = {"type": "function", "function": {"name": "get_weather"}}
WANTED = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}
RIGHT, WRONG = {"city": "Paris"}, {"city": "Pisa"}
THOUGHT = "Hm, 2 < 3</p>."
MAX_DRAWN = 400


CUT = "\0"
"""In texts: between parts that are encoded one by one, so that what is written there is no marker."""


def encode(tokenizer: Tokenizer, text: str) -> list[int]:
    return [token for part in text.split(CUT) for token in tokenizer.encode(part, add_special=False)]


class Script:
    """Draws the text in mind. Where the mask forbids its next token, any allowed token, until the answer ends."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.environment = GrammarEnvironment(tokenizer, tokenizer.vocab_size)
        self.text = ""
        self.num_refused = 0
        self.drawn: list[int] = []

    def __call__(self, request: NewRequest) -> Iterator[int]:
        grammar = request.params.grammar
        assert grammar is not None
        matcher = self.environment.compile(grammar).matcher()
        noise = np.random.default_rng(1)
        wanted = [*encode(self.tokenizer, self.text), self.tokenizer.end_token_ids[0]]
        self.num_refused, self.drawn = 0, []
        while len(self.drawn) < MAX_DRAWN:
            choices = allowed(matcher, self.environment.num_words)
            token = wanted[0] if wanted else int(noise.choice(choices))
            if token in choices:
                wanted = wanted[1:]
            else:
                self.num_refused, wanted = self.num_refused + 1, []
                token = int(noise.choice(choices))
            matcher.consume([token])
            self.drawn.append(token)
            yield token
            if token in self.tokenizer.end_token_ids:
                return


@pytest.fixture(scope="module", params=[(name, kind) for name in SHAPES for kind in KINDS], ids="-".join)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Front, Script]]:
    name, kind = request.param
    tokenizer = tokenizer_of(tmp_path_factory.mktemp("model"), name, kind)
    script = Script(tokenizer)
    template = ChatTemplate(tokenizer.chat_templates, tokenizer.special_tokens)
    with running_front(script, tokenizer=tokenizer, template=template) as front:
        yield front, script


def ask(model: tuple[Front, Script], text: str, **fields: Any) -> dict[str, Any]:
    """The message of the answer, and its `finish_reason`."""
    front, script = model
    script.text = text
    body = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": MAX_DRAWN, **fields}
    reply = post(front.port, CHAT, body)
    assert reply.status == 200, reply.body
    if not fields.get("stream"):
        choice = reply.json["choices"][0]
        return {**choice["message"], "finish_reason": choice["finish_reason"]}
    whole: dict[str, Any] = {"content": "", "tool_calls": []}
    for choice in (choice for chunk in events(reply) for choice in chunk["choices"]):
        delta = choice["delta"]
        whole["content"] += delta.get("content") or ""
        whole["finish_reason"] = choice["finish_reason"]
        for call in delta.get("tool_calls") or ():
            if call.get("id"):
                whole["tool_calls"].append({"function": {"name": "", "arguments": ""}})
            for key, value in call["function"].items():
                whole["tool_calls"][-1]["function"][key] += value
    return whole


def tools(*, strict: bool) -> list[dict[str, Any]]:
    return [{"type": "function", "function": {**TOOL, "strict": strict}}]


def call_of(model: tuple[Front, Script], arguments: dict[str, Any]) -> str:
    text = write_calls(model[0].state.formats.tools, [("get_weather", arguments)])
    return text.removesuffix("<|call|>").replace('"<tool_call>"', f'"<{CUT}tool_call>"')


def thought_of(model: tuple[Front, Script]) -> str:
    reasoning = model[0].state.formats.reasoning
    if reasoning is None:
        return ""
    return f"{reasoning.start}{THOUGHT}{reasoning.end}" + (
        "<|start|>assistant" if reasoning.name == "harmony" else "\n\n"
    )


def check_drawn(model: tuple[Front, Script], text: str) -> None:
    """The mask allowed the whole text; what has a token of its own was drawn as that token. A front that waits for one
    call ends the answer after it."""
    _, script = model
    shown = script.tokenizer.decode(script.drawn, skip_special=False)
    assert script.num_refused == 0, shown
    wanted = [*encode(script.tokenizer, text), script.tokenizer.end_token_ids[0]]
    assert script.drawn == wanted[: len(script.drawn)], shown


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("choice", ["required", NAMED, "auto"])
def test_calls(model: tuple[Front, Script], choice: Any, stream: bool) -> None:
    """With `auto`, calls of strict functions are held to their schema after their opening."""
    front, _ = model
    is_auto = choice == "auto"
    said = "Well, 2 < 3.\n" if is_auto and front.state.formats.tools.body != "harmony" else ""
    for thought in {"", thought_of(model)}:
        for arguments in (RIGHT, {"city": "<tool_call>"}, WRONG):
            text = thought + said + call_of(model, arguments)
            answer = ask(model, text, tools=tools(strict=is_auto), tool_choice=choice, stream=stream)
            if arguments != WRONG:
                check_drawn(model, text)
                assert len(answer["tool_calls"]) == 1
                assert json.loads(answer["tool_calls"][0]["function"]["arguments"]) == arguments
            assert answer["finish_reason"] == "tool_calls"
            assert (answer["content"] or "").strip() == said.strip()
            for call in answer["tool_calls"]:
                assert call["function"]["name"] == "get_weather"
                jsonschema.validate(json.loads(call["function"]["arguments"]), SCHEMA)


@pytest.mark.parametrize("stream", [False, True])
def test_formats_after_reasoning(model: tuple[Front, Script], stream: bool) -> None:
    front, _ = model
    head = front.state.formats.tools.answer_head
    for thought in {"", thought_of(model)}:
        for value in (RIGHT, WRONG):
            text = thought + head + json.dumps(value)
            answer = ask(model, text, response_format=WANTED, stream=stream)
            jsonschema.validate(json.loads(answer["content"]), SCHEMA)
            if value == RIGHT:
                check_drawn(model, text)
        text = thought + head + "no"
        answer = ask(model, text, structured_outputs={"choice": ["yes", "no"]}, stream=stream)
        assert answer["content"] == "no"
        check_drawn(model, text)
        # A schema or a call, as the model likes.
        for text in (thought + head + json.dumps(RIGHT), thought + call_of(model, RIGHT)):
            answer = ask(model, text, response_format=WANTED, tools=tools(strict=False), stream=stream)
            check_drawn(model, text)
            assert bool(answer.get("tool_calls")) == text.endswith(call_of(model, RIGHT))


def test_characters_do_not_stand_in_for_a_marker_that_is_a_token(model: tuple[Front, Script]) -> None:
    """Otherwise reasoning would end, or a call begin, where the grammar does not know it."""
    front, script = model
    formats = front.state.formats
    for marker in [] if formats.reasoning is None else [formats.reasoning.end]:
        start = f"{formats.reasoning.start}Hm" if formats.reasoning else ""
        ask(model, start + CUT.join(marker), response_format=WANTED)
        refused_at = len(encode(script.tokenizer, start)) + len(marker) - 1
        if script.tokenizer.marker_id(marker) is not None:
            assert script.num_refused == 1
            assert script.drawn[:refused_at] == encode(script.tokenizer, start + CUT.join(marker))[:-1]
    for marker in formats.tools.openings:
        ask(model, "Hm " + CUT.join(marker), tools=tools(strict=True))
        if script.tokenizer.marker_id(marker) is not None:
            assert script.num_refused == 1
