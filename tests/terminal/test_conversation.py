"""The conversation and its commands, without a terminal; and the remote backend's errors."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from helpers.fake_openai import FakeServer, running

from millrace.cli import main
from millrace.errors import MillraceError
from millrace.terminal.conversation import Conversation, run_slash
from millrace.terminal.remote_backend import RemoteBackend
from millrace.terminal.sampling_options import AnswerStats


def test_message_without_answer_is_removed() -> None:
    conversation = Conversation()
    conversation.add_user_message("a")
    conversation.add_answer("")
    assert conversation.messages == []


def test_save_as_text_and_save_errors(tmp_path: Path) -> None:
    conversation = Conversation("sys")
    conversation.add_user_message("q")
    conversation.add_answer("a")
    reply = run_slash(f"/save {tmp_path / 'talk.md'}", conversation, "")
    assert "Saved 2 messages" in reply.text
    assert (tmp_path / "talk.md").read_text() == "## system\n\nsys\n\n## user\n\nq\n\n## assistant\n\na\n"
    assert "Cannot write" in run_slash(f"/save {tmp_path / 'no' / 'talk.md'}", conversation, "").text
    assert "Usage: /save FILE" in run_slash("/save", conversation, "").text


def test_system_prompt_is_shown_set_and_removed() -> None:
    conversation = Conversation()
    assert run_slash("/system", conversation, "").text == "No system prompt is set."
    run_slash("/system Be kind", conversation, "")
    assert "Be kind" in run_slash("/system", conversation, "").text
    run_slash("/system -", conversation, "")
    assert conversation.system == ""


def test_stats_summary() -> None:
    stats = AnswerStats(10, 4, 21, first_token_s=0.5, total_s=2.5, finish_reason="stop")
    assert (
        stats.summary()
        == "10 prompt tokens (4 cached), 21 output tokens; first token after 0.50 s, then 10.0 tokens/s;"
        " finish reason: stop"
    )


def test_chat_reads_questions_from_a_pipe(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("hi\n/stats\n"))
    with running(FakeServer(answer=("A", "B"))) as server:
        assert main(["chat", "--url", server.url + "/v1", "--temperature", "0", "--top-k", "3", "--stop", "x"]) == 0
    out = capsys.readouterr().out
    assert "AB\n" in out
    assert "1 prompt tokens, 2 output tokens" in out
    sent = server.requests[0]
    assert (sent["temperature"], sent["top_k"], sent["stop"]) == (0.0, 3, ["x"])
    assert "min_p" not in sent


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["chat", "--url", "nonsense"], "not a server URL"),
        (["chat", "--url", "http://127.0.0.1:9"], "Is the server running?"),
        (["chat", "--temperature", "nan"], "temperature is nan"),
        (["chat", "--temperature", "hot"], "--temperature is 'hot'; it must be a number"),
        (["chat", "--max-tokens", "0"], "max_tokens is 0"),
    ],
)
def test_errors_are_one_sentence(arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) in (1, 2)
    err = capsys.readouterr().err
    assert says in err
    assert err.count("\n") == 1


def test_wrong_key_is_explained() -> None:
    with running(FakeServer(key="right")) as server:
        with pytest.raises(MillraceError, match="401: a key is needed Set the key with --api-key"):
            RemoteBackend(server.url)
        backend = RemoteBackend(server.url, api_key="right")
        assert list(backend.stream_text("x", {"max_tokens": 2})) == [" w0", " w1"]
        assert backend.last.output_tokens == 2
