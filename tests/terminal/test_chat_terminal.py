"""The chat on a pseudo-terminal; answers come from a fake server."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from helpers.fake_openai import FakeServer, running
from helpers.served import wait_until
from helpers.terminal import on_terminal

pytestmark = pytest.mark.live

PROMPT = "you ›"


def contents(server: FakeServer, index: int = -1) -> list[str]:
    return [message["content"] for message in server.requests[index]["messages"]]


def test_streams_answers_and_remembers_the_conversation() -> None:
    with (
        running(FakeServer(answer=("Hello", " there", "."))) as server,
        on_terminal(["chat", "--url", server.url]) as t,
    ):
        t.expect("Chatting with fake")
        t.expect(PROMPT)
        t.type("hi\r")
        t.expect("Hello there.")
        t.expect(PROMPT)
        t.type("again\r")
        t.expect("Hello there.")
        t.expect(PROMPT)
        assert contents(server) == ["hi", "Hello there.", "again"]
        t.type("\x04")
        assert t.wait() == 0, t.screen


def test_ctrl_c_stops_the_answer_and_not_the_program() -> None:
    slow = FakeServer(token_delay_s=0.05)
    with running(slow) as server, on_terminal(["chat", "--url", server.url, "--max-tokens", "1000"]) as t:
        t.expect(PROMPT)
        t.type("count\r")
        t.expect("w3")
        t.ctrl_c()
        t.expect("(stopped)")
        t.expect(PROMPT)
        wait_until(lambda: server.disconnects == 1, "the server notices the disconnect")
        t.type("go on\r")
        t.expect("w1")
        t.ctrl_c()
        t.expect(PROMPT)
        asked = contents(server)
        assert asked[0] == "count"
        assert asked[1].startswith(" w0 w1 w2")
        assert asked[2] == "go on"
        t.type("/exit\r")
        assert t.wait() == 0, t.screen


def test_ctrl_c_twice_at_the_prompt_exits_and_once_does_not() -> None:
    with running(FakeServer(answer=("Yes",))) as server, on_terminal(["chat", "--url", server.url]) as t:
        t.expect(PROMPT)
        t.ctrl_c()
        t.expect("Press Ctrl-C again to exit")
        t.expect(PROMPT)
        t.type("still here?\r")
        t.expect("Yes")
        t.expect(PROMPT)
        t.ctrl_c()
        t.expect("Press Ctrl-C again to exit")
        t.expect(PROMPT)
        t.ctrl_c()
        assert t.wait() == 0, t.screen


def test_slash_commands(tmp_path: Path) -> None:
    file = tmp_path / "talk.json"
    with running(FakeServer(answer=("One",))) as server, on_terminal(["chat", "--url", server.url]) as t:
        t.expect(PROMPT)
        t.type("/help\r")
        t.expect("/regenerate")
        t.expect(PROMPT)
        t.type("/sytem x\r")
        t.expect("Did you mean /system?")
        t.expect(PROMPT)
        t.type("/regenerate\r")
        t.expect("no answer to regenerate")
        t.expect(PROMPT)
        t.type("/system Be brief.\r")
        t.expect("System prompt set")
        t.expect(PROMPT)
        t.type("first\r")
        t.expect("One")
        t.expect(PROMPT)
        assert contents(server) == ["Be brief.", "first"]
        t.type("/regenerate\r")
        t.expect("One")
        t.expect(PROMPT)
        assert contents(server) == ["Be brief.", "first"]
        t.type("/stats\r")
        t.expect("1 prompt tokens, 1 output tokens")
        t.expect(PROMPT)
        t.type(f"/save {file}\r")
        t.expect("Saved 2 messages")
        t.expect(PROMPT)
        t.type("/clear\r")
        t.expect("Conversation cleared")
        t.expect(PROMPT)
        t.type("second\r")
        t.expect("One")
        t.expect(PROMPT)
        assert contents(server) == ["Be brief.", "second"]
        t.type("/exit\r")
        assert t.wait() == 0, t.screen
    assert [message["role"] for message in json.loads(file.read_text())] == ["system", "user", "assistant"]


def test_line_editing_continuation_and_history() -> None:
    with running(FakeServer(answer=("Ok",))) as server, on_terminal(["chat", "--url", server.url]) as t:
        t.expect(PROMPT)
        t.type("wrld\x1b[D\x1b[D\x1b[Do\r")  # three times left, then the missing letter
        t.expect("Ok")
        t.expect(PROMPT)
        assert contents(server) == ["world"]
        t.type("one \\\r")
        t.expect("…")
        t.type("two\r")
        t.expect("Ok")
        t.expect(PROMPT)
        assert contents(server)[-1] == "one \ntwo"
        t.type("\x1b[A\x1b[A\x1b[A\r")  # three lines back in the history
        t.expect("Ok")
        assert contents(server)[-1] == "world"


def test_server_error_is_shown_and_the_chat_continues() -> None:
    with running(FakeServer(answer=("Fine",))) as server, on_terminal(["chat", "--url", server.url]) as t:
        t.expect(PROMPT)
        server.status = 429
        t.type("one\r")
        t.expect("returned 429: so it was decided")
        t.expect(PROMPT)
        server.status = 0
        t.type("two\r")
        t.expect("Fine")
        t.expect(PROMPT)
        assert contents(server) == ["two"], "a question without an answer is taken back"


def test_pasted_lines_and_quotes_are_one_turn() -> None:
    with running(FakeServer(answer=("Ok",))) as server, on_terminal(["chat", "--url", server.url]) as t:
        t.expect(PROMPT)
        t.type("one\rtwo\rthree\r")  # A terminal without bracketed paste.
        t.expect("Ok")
        t.expect(PROMPT)
        assert contents(server) == ["one\ntwo\nthree"]
        t.type("\x1b[200~four\nfive\x1b[201~\r")
        t.expect("Ok")
        t.expect(PROMPT)
        assert contents(server)[-1] == "four\nfive"
        t.type('"""six\r')
        t.expect("…")
        t.type('seven"""\r')
        t.expect("Ok")
        t.expect("tokens")
        assert contents(server)[-1] == "six\nseven"


def test_typing_during_an_answer_does_not_mix_in() -> None:
    slow = FakeServer(token_delay_s=0.05)
    with running(slow) as server, on_terminal(["chat", "--url", server.url, "--max-tokens", "12"]) as t:
        t.expect(PROMPT)
        t.type("count\r")
        t.expect("w2")
        t.type("typed ahead")
        before = t.expect("w11")
        assert "typed" not in before
        t.expect(PROMPT)
        t.expect("typed ahead")
        t.type("\r")
        t.expect("w1")
        assert contents(server)[-1] == "typed ahead"


def test_set_model_and_retry() -> None:
    with (
        running(FakeServer(models=("fake", "other"), answer=("One",))) as server,
        on_terminal(["chat", "--url", server.url]) as t,
    ):
        t.expect(PROMPT)
        t.type("/set temperature 0.5\r")
        t.expect("temperature is 0.5")
        t.type("/model other\r")
        t.expect("Now chatting with other")
        t.type("hi\r")
        t.expect("One")
        t.expect("tokens")
        t.type("/retry\r")
        t.expect("One")
        t.expect("tokens")
    assert [(r["model"], r["temperature"]) for r in server.requests] == [("other", 0.5)] * 2
    assert contents(server) == ["hi"]
