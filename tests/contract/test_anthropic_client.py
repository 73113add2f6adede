"""The stock `anthropic` client, unchanged, against a front on a real socket."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import anthropic
import pytest
from serve.front_under_test import MODEL, Front, endless, running_front, saying
from serve.wire import get, post

from millrace.link.messages import unpack_tokens

pytestmark = pytest.mark.live

TEXT = 'Grüße, "world" 🌍\nbye'
HI: list[Any] = [{"role": "user", "content": "hi"}]
MESSAGES = "/v1/messages"


@pytest.fixture(scope="module")
def front() -> Iterator[Front]:
    with running_front(saying(TEXT), max_context=256) as running:
        yield running


@pytest.fixture(scope="module")
def client(front: Front) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=front.url, api_key="any", max_retries=0) as made:
        yield made


def prompt_of(front: Front) -> str:
    return bytes(unpack_tokens(front.engine.received[-1].prompt).tolist()).decode()


def test_models(client: anthropic.Anthropic, front: Front) -> None:
    listed = client.models.list()
    [shown] = listed.data
    assert (shown.type, shown.id, shown.display_name, shown.max_tokens) == ("model", MODEL, MODEL, 256)
    assert shown.created_at.year >= 2024
    assert (listed.has_more, listed.first_id, listed.last_id) == (False, MODEL, MODEL)
    assert client.models.retrieve(MODEL) == shown
    with pytest.raises(anthropic.NotFoundError) as info:
        client.models.retrieve("nosuch")
    body: Any = info.value.body
    assert (body["type"], body["error"]["type"]) == ("error", "not_found_error")
    assert get(front.port, "/v1/models").json["object"] == "list", "without the header the form is OpenAI's"


def test_a_message(client: anthropic.Anthropic, front: Front) -> None:
    message = client.messages.create(
        model=MODEL, max_tokens=100, messages=HI, system="Be kind.", extra_body={"temperature": 0.5}
    )
    assert [block.text for block in message.content if block.type == "text"] == [TEXT]
    assert message.role == "assistant"
    assert message.stop_reason == "end_turn"
    assert message.stop_sequence is None
    assert message.model == MODEL
    assert message.id.startswith("msg_")
    assert prompt_of(front) == "[system]Be kind.\n[user]hi\n[assistant]"
    usage = message.usage
    cached = usage.cache_read_input_tokens or 0
    assert usage.input_tokens + cached == len(prompt_of(front))
    assert usage.output_tokens == len(TEXT.encode()) + 1


def test_blocks_and_a_prefilled_answer(client: anthropic.Anthropic, front: Front) -> None:
    conversation: list[Any] = [
        {"role": "user", "content": [{"type": "text", "text": "one", "cache_control": {"type": "ephemeral"}}]},
        {"role": "assistant", "content": "It is"},
    ]
    client.messages.create(
        model=MODEL,
        max_tokens=100,
        messages=conversation,
        system=[{"type": "text", "text": "S"}],
        extra_body={"top_k": 5, "top_p": 0.9},
    )
    assert prompt_of(front) == "[system]S\n[user]one\n[assistant]It is"


def test_stop_reasons(client: anthropic.Anthropic) -> None:
    message = client.messages.create(model=MODEL, max_tokens=100, messages=HI, stop_sequences=["world", "zz"])
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", "world")
    assert message.content[0].text == 'Grüße, "'  # type: ignore[union-attr]
    message = client.messages.create(model=MODEL, max_tokens=3, messages=HI)
    assert (message.stop_reason, message.stop_sequence) == ("max_tokens", None)


def test_raw_events_in_order(client: anthropic.Anthropic) -> None:
    events = list(client.messages.create(model=MODEL, max_tokens=100, messages=HI, stream=True))
    kinds = [event.type for event in events]
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert set(kinds[2:-3]) == {"content_block_delta"}


def test_the_stream_is_the_whole_answer(client: anthropic.Anthropic) -> None:
    whole = client.messages.create(model=MODEL, max_tokens=100, messages=HI)
    with client.messages.stream(model=MODEL, max_tokens=100, messages=HI) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == TEXT
    assert [block.text for block in final.content] == [TEXT]
    assert final.stop_reason == whole.stop_reason
    assert final.usage.output_tokens == whole.usage.output_tokens
    assert final.usage.input_tokens == whole.usage.input_tokens
    assert final.usage.cache_read_input_tokens == whole.usage.cache_read_input_tokens


def test_count_tokens(client: anthropic.Anthropic) -> None:
    counted = client.messages.count_tokens(model=MODEL, messages=HI, system="Be kind.")
    assert counted.input_tokens == len("[system]Be kind.\n[user]hi\n[assistant]")


@pytest.mark.parametrize(
    ("fields", "kind", "param"),
    [
        ({"max_tokens": 10**4}, anthropic.BadRequestError, "max_tokens"),
        ({"max_tokens": 0}, anthropic.BadRequestError, "max_tokens"),
        ({"extra_body": {"temperature": 1.5}}, anthropic.BadRequestError, "temperature"),
        ({"messages": []}, anthropic.BadRequestError, "messages"),
        ({"stop_sequences": [""]}, anthropic.BadRequestError, "stop_sequences"),
        ({"model": "claude"}, anthropic.NotFoundError, "model"),
        ({"tools": [{"name": "f g", "input_schema": {}}]}, anthropic.BadRequestError, "tools[0].name"),
        ({"thinking": {"type": "enabled", "budget_tokens": 2000}}, anthropic.BadRequestError, "thinking"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
            anthropic.BadRequestError,
            "messages[0].content[0].type",
        ),
        ({"extra_body": {"top_q": 1}}, anthropic.BadRequestError, "top_q"),
    ],
)
def test_errors(client: anthropic.Anthropic, fields: dict[str, Any], kind: type[Exception], param: str) -> None:
    with pytest.raises(kind) as caught:
        client.messages.create(**{"model": MODEL, "max_tokens": 10, "messages": HI, **fields})
    assert isinstance(caught.value, anthropic.APIStatusError)
    body: Any = caught.value.body
    assert body["type"] == "error"
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["param"] == param


def test_a_suggestion_for_a_misspelt_field(front: Front) -> None:
    reply = post(front.port, MESSAGES, {"model": MODEL, "messages": HI, "max_token": 3, "max_tokens": 3})
    assert "Did you mean 'max_tokens'?" in reply.json["error"]["message"]


def test_an_error_inside_a_stream_is_raised() -> None:
    with (
        running_front(endless, step_s=0.01) as front,
        anthropic.Anthropic(base_url=front.url, api_key="any", max_retries=0) as client,
    ):
        stream = client.messages.create(model=MODEL, max_tokens=1000, messages=HI, stream=True)
        next(iter(stream))
        front.call(lambda: front.engine.die("The engine is gone."))
        with pytest.raises(anthropic.APIStatusError) as caught:
            list(stream)
        assert "gone" in str(caught.value)


def test_documents_and_search_results_that_are_text(client: anthropic.Anthropic, front: Front) -> None:
    found: Any = {"type": "search_result", "source": "s", "title": "t", "content": [{"type": "text", "text": "r"}]}
    plain: Any = {"type": "text", "media_type": "text/plain", "data": "d"}
    document: Any = {"type": "document", "source": plain, "title": "D", "context": "c", "citations": {"enabled": False}}
    content: Any = {"type": "document", "source": {"type": "content", "content": [{"type": "text", "text": "e"}]}}
    client.messages.create(
        model=MODEL, max_tokens=9, messages=[{"role": "user", "content": [found, document, content]}]
    )
    assert prompt_of(front) == "[user]t (s)\nr\nD\nc\nd\ne\n[assistant]"
    call: Any = {"type": "tool_use", "id": "x", "name": "f", "input": {}}
    result: Any = {"type": "tool_result", "tool_use_id": "x", "content": [document]}
    told: Any = [*HI, {"role": "assistant", "content": [call]}, {"role": "user", "content": [result]}]
    client.messages.create(model=MODEL, max_tokens=9, messages=told)
    assert "D\nc\nd" in prompt_of(front)
    for source in ({"type": "base64", "media_type": "application/pdf", "data": ""}, {"type": "url", "url": "u"}):
        wrong: Any = [{"role": "user", "content": [{"type": "document", "source": source}]}]
        with pytest.raises(anthropic.BadRequestError, match=rf"source' is of type '{source['type']}', which is not"):
            client.messages.create(model=MODEL, max_tokens=9, messages=wrong)
    with pytest.raises(anthropic.BadRequestError, match="citations.enabled"):
        client.messages.create(
            model=MODEL,
            max_tokens=9,
            messages=[{"role": "user", "content": [{**document, "citations": {"enabled": True}}]}],
        )


def test_a_system_message_within_the_conversation(client: anthropic.Anthropic, front: Front) -> None:
    told: Any = [*HI, {"role": "system", "content": [{"type": "text", "text": "Be brief."}]}, *HI]
    client.messages.create(model=MODEL, max_tokens=9, messages=told)
    assert prompt_of(front) == "[user]hi\n[system]Be brief.\n[user]hi\n[assistant]"


def test_the_tool_runner_sends_the_whole_conversation(client: anthropic.Anthropic) -> None:
    """It asks for a thread that the server holds, and goes on without one where there is none."""

    @anthropic.beta_tool
    def look(city: str) -> str:
        """Look at a city."""
        return "sunny"

    with running_front(saying(TEXT)) as roomy, anthropic.Anthropic(base_url=roomy.url, api_key="any") as other:
        [message] = other.beta.messages.tool_runner(model=MODEL, max_tokens=99, messages=HI, tools=[look])
        assert message.stop_reason == "end_turn"
    with pytest.raises(anthropic.BadRequestError, match="'thread'"):
        client.beta.messages.create(model=MODEL, max_tokens=9, messages=HI, thread={"type": "create"})
