"""/api/generate: conversations by `context`, and templates of the request."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import ollama
import pytest
from serve.front_under_test import MODEL, Front, running_front, saying
from serve.wire import post

from millrace.errors import BadRequest
from millrace.link.messages import unpack_tokens
from millrace.serve.ollama.go_template import GoTemplate
from millrace.text.chat.template import ChatTemplate

pytestmark = pytest.mark.live

TEXT = "Grüße 🌍 END bye"


@pytest.fixture(scope="module")
def front() -> Iterator[Front]:
    with running_front(saying(TEXT), max_context=1024) as running:
        yield running


@pytest.fixture(scope="module")
def client(front: Front) -> ollama.Client:
    return ollama.Client(front.url)


def last_prompt(front: Front) -> list[int]:
    prompt: list[int] = unpack_tokens(front.engine.received[-1].prompt).tolist()
    return prompt


def text_of(ids: Any) -> str:
    return bytes(ids or ()).decode()


@pytest.mark.parametrize("stream", [False, True])
def test_a_context_continues_the_conversation_as_chat_does(front: Front, client: ollama.Client, stream: bool) -> None:
    def ask(prompt: str, **fields: Any) -> ollama.GenerateResponse:
        if stream:
            return list(client.generate(MODEL, prompt, stream=True, **fields))[-1]
        return client.generate(MODEL, prompt, **fields)

    first = ask("one", system="S")
    assert text_of(first.context) == f"[system]S\n[user]one\n[assistant]{TEXT}"
    second = ask("two", context=first.context)
    by_generate = last_prompt(front)
    messages = [
        {"role": "system", "content": "S"},
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": TEXT},
        {"role": "user", "content": "two"},
    ]
    client.chat(MODEL, messages)
    assert by_generate == last_prompt(front)
    assert second.prompt_eval_count == len(by_generate)
    assert text_of(second.context) == text_of(by_generate) + TEXT


@pytest.mark.parametrize("stream", [False, True])
def test_a_context_ends_where_the_answer_ends(client: ollama.Client, stream: bool) -> None:
    for options, kept in (({"stop": ["END"]}, "Grüße 🌍 "), ({"num_predict": 4}, "Grü")):
        whole: Any = client.generate(MODEL, "one", options=options, stream=stream)
        last = list(whole)[-1] if stream else whole
        assert text_of(last.context) == f"[user]one\n[assistant]{kept}"


def test_a_raw_answer_has_no_context(front: Front, client: ollama.Client) -> None:
    assert client.generate(MODEL, "one", raw=True).context is None
    assert list(client.generate(MODEL, "one", raw=True, stream=True))[-1].context is None
    for field, value in (("context", [1]), ("template", "{{ .Prompt }}")):
        error = post(front.port, "/api/generate", {"model": MODEL, "prompt": "a", "raw": True, field: value})
        assert error.status == 400
        assert error.json["param"] == field


def test_a_context_of_another_model_is_refused(front: Front, client: ollama.Client) -> None:
    for context in ([1, 300], [-1], [2**70]):
        error = post(front.port, "/api/generate", {"model": MODEL, "prompt": "a", "context": context}).json
        assert error["param"] == "context"
    with pytest.raises(ollama.ResponseError, match="cannot be combined with 'suffix'"):
        client.generate(MODEL, "one", suffix="x", context=[1])


def test_a_context_without_a_chat_template() -> None:
    with running_front(saying("x"), template=ChatTemplate({}, {})) as front:
        client = ollama.Client(front.url)
        first = client.generate(MODEL, "one")
        client.generate(MODEL, "two", context=first.context)
        assert text_of(last_prompt(front)) == "onextwo"


CHATML = (
    "{{- if .System }}<s>{{ .System }}</s>\n{{ end }}"
    "{{ if .Suffix }}<pre>{{ .Prompt }}<suf>{{ .Suffix }}<mid>{{ else }}<u>{{ .Prompt }}</u>\n<a>{{ end }}"
    "{{ .Response }}</a>\n"
)


def test_a_template_of_the_request(front: Front, client: ollama.Client) -> None:
    first = client.generate(MODEL, "one", system="S", template=CHATML)
    assert text_of(last_prompt(front)) == "<s>S</s>\n<u>one</u>\n<a>"
    client.generate(MODEL, "two", template=CHATML, context=first.context)
    assert text_of(last_prompt(front)) == f"<s>S</s>\n<u>one</u>\n<a>{TEXT}</a>\n<u>two</u>\n<a>"
    client.generate(MODEL, "def f", suffix="return", template=CHATML)
    assert text_of(last_prompt(front)) == "<pre>def f<suf>return<mid>"
    with pytest.raises(ollama.ResponseError, match="does not use .System"):
        client.generate(MODEL, "one", system="S", template="{{ .Prompt }}")


@pytest.mark.parametrize(
    ("source", "named"),
    [
        ("{{ range .Messages }}{{ end }}", "range .Messages"),
        ("{{ .Tools }}", ".Tools"),
        ("{{ if .Prompt }}", "without an 'end'"),
        ("{{ if eq .Prompt .System }}{{ end }}", "eq"),
        ("{{ end }}", "end"),
        ("{{ .Prompt", "not closed"),
        ("{{ if .Prompt }}{{ else }}{{ else }}{{ end }}", "two 'else'"),
        ("{{ if .Prompt }}" * 33 + "{{ end }}" * 33, "more than 32"),
    ],
)
def test_what_a_template_may_not_use_is_named(source: str, named: str) -> None:
    with pytest.raises(BadRequest, match=r"a template may use \.System") as error:
        GoTemplate(source)
    assert named in error.value.message
    assert error.value.param == "template"


def test_conditions_and_trimming() -> None:
    template = GoTemplate(
        "{{/* who */}}a {{- if and .System .Prompt }}B{{ else if not .Prompt }}C{{ else }}D{{ end -}} \n e"
        "{{ .Response }}f"
    )
    assert template.render({"System": "s", "Prompt": "p"}) == ("aBe", "f")
    assert template.render({}) == ("aCe", "f")
    assert template.render({"Prompt": "p"}) == ("aDe", "f")
    assert GoTemplate("{{if or .System .Suffix}}x{{end}}{{.Prompt}}").render({"Prompt": "p"}) == ("p", "")


def test_a_context_is_never_shifted(front: Front) -> None:
    for path, asked in (
        ("/api/generate", {"prompt": "a"}),
        ("/api/chat", {"messages": [{"role": "user"} | {"content": "a"}]}),
    ):
        body = {"model": MODEL, "stream": False, "shift": True, **asked}
        error = post(front.port, path, body)
        assert (error.status, error.json["param"]) == (400, "shift")
        assert "options.num_predict" in error.json["message"]
        assert post(front.port, path, {**body, "options": {"num_predict": 3}}).status == 200
        assert post(front.port, path, {**body, "shift": False}).status == 200
