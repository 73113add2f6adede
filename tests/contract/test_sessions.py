"""Sessions: only what is new is computed in a turn; private, bounded, and there again after an engine was lost."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from contract.real_server import RealServer, real_server
from helpers.tiny_server import NAME, tiny_options
from serve.wire import CHAT, Reply, request

from millrace.serve.tenancy.keyring import digest_of

pytestmark = pytest.mark.live
SESSIONS = "/v1/sessions"
LIMITS = {"acme": "", "small": "cache_mib = 1", "boss": "operator = true"}
BLOCK = 16
TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


def ask(server: RealServer, who: str, method: str, path: str, body: Any = None, **headers: str) -> Reply:
    return request(server.port, method, path, body, headers={"Authorization": f"Bearer key-{who}", **headers})


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServer]:
    directory = tmp_path_factory.mktemp("sessions")
    keys = directory / "keys.toml"
    keys.write_text(
        "".join(
            f'[tenants.{name}]\nkeys = ["sha256:{digest_of(f"key-{name}").hex()}"]\n{more}\n'
            for name, more in LIMITS.items()
        )
    )
    options = [*tiny_options(directory), "--keys-file", str(keys), "--block-size", str(BLOCK)]
    options[options.index("--kv-tokens") + 1] = "8192"
    (directory / "template.jinja").write_text(TEMPLATE)
    with ExitStack() as stack:
        yield stack.enter_context(real_server(*options))


def begin(server: RealServer, who: str = "acme", **fields: Any) -> str:
    made = ask(server, who, "POST", SESSIONS, fields)
    assert made.status == 200, made.body
    return str(made.json["id"])


def say(server: RealServer, session: str, text: str, who: str = "acme", **fields: Any) -> dict[str, Any]:
    """A turn; returns its counts as the header says them."""
    message = {"role": "user", "content": text}
    body = {"model": NAME, "session_id": session, "messages": [message], "max_tokens": 20, "seed": 1, **fields}
    reply = ask(server, who, "POST", CHAT, body)
    assert reply.status == 200, reply.body
    counts = dict(part.split("=") for part in reply.headers["x-session-turn"].split("; "))
    return {"answer": reply.json, **{name: int(value) for name, value in counts.items()}}


def seen(server: RealServer, session: str, who: str = "acme") -> Any:
    return ask(server, who, "GET", f"{SESSIONS}/{session}").json


def test_a_turn_computes_what_is_new_and_no_more(server: RealServer) -> None:
    session = begin(server, system="Read this with care. " * 20, ttl_s=900)
    known = 0
    for number in range(1, 5):
        text = f"Question {number}: " + "why? " * 6
        turn = say(server, session, text)
        new = turn["prompt"] - known
        assert turn["number"] == number
        assert turn["cached"] + turn["computed"] == turn["prompt"]
        # Whole blocks are kept, and the last token of the prompt is computed anyway.
        assert turn["computed"] <= new + BLOCK, turn
        assert turn["cached"] == known // BLOCK * BLOCK
        assert turn["recomputed"] == 0
        assert turn["answer"]["usage"]["prompt_tokens_details"]["cached_tokens"] == turn["cached"]
        shown = seen(server, session)
        known = shown["tokens"] - 1  # The last token was drawn and is not computed yet.
        assert shown["turns"] == number
        assert shown["kv"]["locations"]["device"] == shown["kv"]["tokens"] == known // BLOCK * BLOCK
        assert shown["last_turn"]["computed_tokens"] == turn["computed"]
    assert shown["messages"] == 1 + 2 * number
    assert shown["hit_tokens"] > 0
    assert shown["kv"]["bytes"] > 0


def test_ollamas_keep_alive_and_context_keep_what_was_computed(server: RealServer) -> None:
    def hints() -> list[float]:
        found = ask(server, "small", "GET", "/v1/cache").json["data"]
        return [one["ttl_s"] for one in found if one["is_hint"]]

    body = {"model": NAME, "prompt": "Row the boat. " * 12, "stream": False, "options": {"num_predict": 4}}
    first = ask(server, "small", "POST", "/api/generate", body)
    assert (first.status, hints()) == (200, [])
    more = {**body, "prompt": "And then?", "context": first.json["context"]}
    assert ask(server, "small", "POST", "/api/generate", more).status == 200
    assert hints() == [600]
    assert ask(server, "small", "POST", "/api/generate", {**more, "keep_alive": "2h"}).status == 200
    assert 7200 in hints()
    for one in ask(server, "small", "GET", "/v1/cache").json["data"]:
        assert ask(server, "small", "DELETE", f"/v1/cache/{one['id']}").status == 200


def test_an_answer_is_that_of_the_whole_conversation(server: RealServer) -> None:
    session, said = begin(server), []
    for text in ("One two three four five six seven.", "And then?"):
        said.append({"role": "user", "content": text})
        turn = say(server, session, text, temperature=0)["answer"]["choices"][0]["message"]["content"]
        whole = {"model": NAME, "messages": said, "max_tokens": 20, "temperature": 0, "cache_salt": "apart"}
        other = ask(server, "acme", "POST", CHAT, whole).json["choices"][0]["message"]["content"]
        if len(said) == 1:  # Later, the drawn tokens need not be those that their text is encoded as.
            assert turn == other
        said.append({"role": "assistant", "content": turn})


def test_every_way_to_name_a_session_continues_it(server: RealServer) -> None:
    session = begin(server, system="Be brief. " * 20)
    message = [{"role": "user", "content": "And?"}]
    own = ask(server, "acme", "POST", f"{SESSIONS}/{session}/turns", {"messages": message, "max_tokens": 4})
    assert own.status == 200
    assert own.headers["x-session-turn"].startswith("number=1;")
    chat = {"model": NAME, "messages": message, "max_tokens": 4}
    header = ask(server, "acme", "POST", CHAT, chat, **{"X-Millrace-Session": session})
    assert header.headers["x-session-turn"].startswith("number=2;")
    anthropic = ask(server, "acme", "POST", "/v1/messages", chat, **{"X-Millrace-Session": session})
    assert anthropic.headers["x-session-turn"].startswith("number=3;"), anthropic.body
    assert anthropic.json["usage"]["cache_read_input_tokens"] > 0
    response = {"model": NAME, "input": "And?", "max_output_tokens": 4, "session_id": session}
    assert ask(server, "acme", "POST", "/v1/responses", response).headers["x-session-turn"].startswith("number=4;")
    ollama = {"model": NAME, "messages": message, "stream": False, "options": {"num_predict": 4}, "session_id": session}
    assert ask(server, "acme", "POST", "/api/chat", ollama).headers["x-session-turn"].startswith("number=5;")
    streamed = ask(server, "acme", "POST", CHAT, {**chat, "session_id": session, "stream": True})
    assert b"[DONE]" in streamed.body
    assert streamed.headers["x-session-turn"] == "number=6"
    shown = seen(server, session)
    assert (shown["turns"], shown["messages"]) == (6, 13)
    both = {**chat, "session_id": "sess_other"}
    assert ask(server, "acme", "POST", CHAT, both, **{"X-Millrace-Session": session}).error["param"] == "session_id"


def test_a_fork_shares_the_past_and_goes_its_own_way(server: RealServer) -> None:
    session = begin(server, system="A long past. " * 30)
    say(server, session, "Left or right?")
    made = ask(server, "acme", "POST", f"{SESSIONS}/{session}/fork", {"ttl_s": 60, "id": "other"}).json
    assert made["id"] == "other"
    assert ask(server, "acme", "POST", f"{SESSIONS}/{session}/fork", {"id": "other"}).status == 409
    assert begin(server, "small", id="other") == "other"  # Ids are a tenant's own.
    assert made["kv"]["tokens"] == seen(server, session)["kv"]["tokens"]
    assert ask(server, "acme", "DELETE", f"{SESSIONS}/{session}").json["deleted"] is True
    turn = say(server, made["id"], "Left.")
    assert turn["cached"] >= made["kv"]["tokens"]
    assert turn["number"] == 2
    assert ask(server, "acme", "GET", f"{SESSIONS}/{session}").status == 404


def test_sessions_are_listed_renewed_and_ended(server: RealServer) -> None:
    session = begin(server, ttl_s=50, metadata={"user": "ada"}, priority="batch")
    listed = ask(server, "acme", "GET", f"{SESSIONS}?limit=1").json
    assert [one["id"] for one in listed["data"]] == [session]
    assert listed["has_more"] is True
    assert (listed["data"][0]["metadata"], listed["data"][0]["priority"]) == ({"user": "ada"}, "batch")
    renewed = ask(server, "acme", "POST", f"{SESSIONS}/{session}/renew", {"ttl_s": 700}).json
    assert renewed["ttl_s"] == 700
    assert renewed["expires_at"] > listed["data"][0]["expires_at"]
    ask(server, "acme", "DELETE", f"{SESSIONS}/{session}")
    assert ask(server, "acme", "DELETE", f"{SESSIONS}/{session}").status == 404


def test_no_tenant_finds_the_session_of_another(server: RealServer) -> None:
    session = begin(server, system="Secret. " * 20)
    say(server, session, "Go on.")
    chat = {"model": NAME, "session_id": session, "messages": [{"role": "user", "content": "?"}], "max_tokens": 1}
    for method, path, body in (
        ("GET", f"{SESSIONS}/{session}", None),
        ("DELETE", f"{SESSIONS}/{session}", None),
        ("POST", f"{SESSIONS}/{session}/fork", {}),
        ("POST", f"{SESSIONS}/{session}/renew", {}),
        ("POST", f"{SESSIONS}/{session}/turns", {"messages": chat["messages"]}),
        ("POST", CHAT, chat),
    ):
        for who in ("small", "boss"):
            assert ask(server, who, method, path, body).status == 404, (who, method, path)
    assert session not in [one["id"] for one in ask(server, "small", "GET", SESSIONS).json["data"]]
    assert seen(server, session)["turns"] == 1


def test_full_is_refused_before_anything_is_computed(server: RealServer) -> None:
    session = begin(server, max_bytes=1)
    chat = {"model": NAME, "session_id": session, "messages": [{"role": "user", "content": "word " * 60}]}
    reply = ask(server, "acme", "POST", CHAT, {**chat, "max_tokens": 1})
    assert (reply.status, reply.error["code"]) == (429, "cache_full")
    assert "max_bytes is 1" in reply.error["message"]
    assert seen(server, session)["turns"] == 0


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"n": 2, "temperature": 1}, "session_id"),
        ({"truncate_prompt_tokens": 4}, "session_id"),
        ({"session_id": "sess_none"}, "session_id"),
    ],
)
def test_what_no_session_can_be_is_refused(server: RealServer, fields: dict[str, Any], param: str) -> None:
    chat = {"model": NAME, "session_id": begin(server), "messages": [{"role": "user", "content": "One two three"}]}
    reply = ask(server, "acme", "POST", CHAT, {**chat, "max_tokens": 2, **fields})
    assert (reply.status in (400, 404), reply.error["param"]) == (True, param), reply.body
