"""The conversation and its commands, without a terminal; and the remote backend's errors."""

from __future__ import annotations

import io
import re
from pathlib import Path

import pytest
from helpers.fake_openai import FakeServer, running

from millrace.cli import main
from millrace.errors import MillraceError
from millrace.terminal.chat.conversation import Conversation, run_slash
from millrace.terminal.chat.markdown import MarkdownStream
from millrace.terminal.remote_backend import RemoteBackend
from millrace.terminal.sampling_options import AnswerStats

_COLOUR = re.compile(r"\x1b\[[0-9;]*m")


def test_message_without_answer_is_removed() -> None:
    conversation = Conversation()
    conversation.add_user_message("a")
    conversation.add_answer("")
    assert conversation.messages == []


def test_save_as_text_and_save_errors(tmp_path: Path) -> None:
    conversation = Conversation("sys")
    conversation.add_user_message("q")
    conversation.add_answer("a")
    reply = run_slash(f"/save {tmp_path / 'talk.md'}", conversation, {}, "m", "")
    assert "Saved 2 messages" in reply.text
    assert (tmp_path / "talk.md").read_text() == "## system\n\nsys\n\n## user\n\nq\n\n## assistant\n\na\n"
    assert "Cannot write" in run_slash(f"/save {tmp_path / 'no' / 'talk.md'}", conversation, {}, "m", "").text
    assert "Usage: /save FILE" in run_slash("/save", conversation, {}, "m", "").text


def test_save_overwrites_only_when_told_to(tmp_path: Path) -> None:
    conversation, path = Conversation(), tmp_path / "talk.md"
    path.write_text("precious")
    conversation.add_user_message("q")
    assert f"To overwrite it: /save! {path}" in run_slash(f"/save {path}", conversation, {}, "m", "").text
    assert path.read_text() == "precious"
    assert "Saved 1 messages" in run_slash(f"/save! {path}", conversation, {}, "m", "").text
    assert "precious" not in path.read_text()


def test_the_list_of_chat_commands_fits_80_columns() -> None:
    assert max(map(len, run_slash("/help", Conversation(), {}, "m", "").text.splitlines())) < 80


def test_system_prompt_is_shown_set_and_removed() -> None:
    conversation = Conversation()
    assert run_slash("/system", conversation, {}, "m", "").text == "No system prompt is set."
    run_slash("/system Be kind", conversation, {}, "m", "")
    assert "Be kind" in run_slash("/system", conversation, {}, "m", "").text
    run_slash("/system -", conversation, {}, "m", "")
    assert conversation.system == ""


def test_stats_summary() -> None:
    stats = AnswerStats(10, 4, 21, first_token_s=0.5, total_s=2.5, finish_reason="stop")
    assert (
        stats.summary()
        == "10 prompt tokens (4 cached), 21 output tokens; first token after 0.50 s, then 10.0 tokens/s;"
        " finish reason: stop"
    )


@pytest.mark.live
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


@pytest.mark.live
def test_a_piped_chat_with_an_error_fails(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The chat goes on after the error, which is on standard error, apart from the answers."""
    monkeypatch.setattr("sys.stdin", io.StringIO("hi\n/model nosuch\n/stats\n"))
    with running(FakeServer(answer=("A", "B"), fail_after=0)) as server:
        assert main(["chat", "--url", server.url]) == 1
    shown = capsys.readouterr()
    assert "worn out" in shown.err
    assert f"{server.url} has no model 'nosuch'. It has: fake." in shown.err
    assert "worn out" not in shown.out
    assert "nosuch" not in shown.out
    assert "No answer yet." in shown.out


@pytest.mark.live
def test_a_server_is_asked_whether_it_has_the_model() -> None:
    with running(FakeServer()) as server:
        with pytest.raises(MillraceError, match="has no model 'nosuch'. It has: fake"):
            RemoteBackend(server.url, "nosuch")
        assert RemoteBackend(server.url, "fake").model_name == "fake"


@pytest.mark.live
def test_stats_of_a_stopped_answer() -> None:
    """A server that counts only at the end is not quoted with zeros; Millrace's own are asked to count meanwhile."""
    with running(FakeServer(answer=tuple("abcdef"))) as server:
        backend = RemoteBackend(server.url)
        stream = backend.stream_chat([{"role": "user", "content": "hi"}], {})
        next(stream)
        stream.close()
        assert backend.last.summary().startswith("unknown number of prompt tokens, 1 output tokens")
        assert server.requests[-1]["stream_options"] == {"include_usage": True}
    with running(FakeServer(answer=tuple("abcdef"), owner="millrace")) as server:
        backend = RemoteBackend(server.url)
        stream = backend.stream_chat([{"role": "user", "content": "hi there"}], {})
        next(stream), next(stream)
        stream.close()
        assert backend.last.summary().startswith("2 prompt tokens, 2 output tokens")


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


@pytest.mark.live
def test_wrong_key_is_explained() -> None:
    with running(FakeServer(key="right")) as server:
        with pytest.raises(MillraceError, match="401: a key is needed Set the key with --api-key"):
            RemoteBackend(server.url)
        backend = RemoteBackend(server.url, api_key="right")
        assert list(backend.stream_text("x", {"max_tokens": 2})) == [" w0", " w1"]
        assert backend.last.output_tokens == 2


def test_set_changes_sampling_and_checks_it() -> None:
    fields: dict[str, object] = {}

    def run(line: str) -> str:
        return run_slash(line, Conversation(), fields, "m", "").text

    assert run("/set") == "Sampling: the model's choice."
    assert run("/set temperature 0.5") == "temperature is 0.5 from the next answer on."
    run("/set max-tokens 7")
    assert fields == {"temperature": 0.5, "max_tokens": 7}
    assert "must be between" in run("/set temperature 1000")
    assert "not a number" in run("/set top_k many")
    assert "There is no 'colour'" in run("/set colour 1")
    run("/set temperature -")
    assert fields == {"max_tokens": 7}


def test_load_reads_what_save_wrote(tmp_path: Path) -> None:
    first = Conversation("Be brief.")
    first.add_user_message("hi")
    first.add_answer("ho")
    first.save(tmp_path / "talk.json")
    second = Conversation()
    assert second.load(tmp_path / "talk.json").startswith("Loaded 2 messages")
    assert second.messages == first.messages
    (tmp_path / "bad.json").write_text('[{"role": "user"}]')
    assert "not a list of messages" in second.load(tmp_path / "bad.json")
    for content in ("[1]", '[{"type": "text"}]', '[{"type": "text", "text": 1}]', '[{"text": "hi"}]', "{}"):
        (tmp_path / "bad.json").write_text(f'[{{"role": "system", "content": {content}}}]')
        assert "not a list of messages" in second.load(tmp_path / "bad.json")
    (tmp_path / "text.md").write_text("## user")
    assert "not JSON" in second.load(tmp_path / "text.md")
    assert "Cannot read" in second.load(tmp_path / "absent.json")
    assert second.messages == first.messages


def shown(text: str, *, width: int = 30, colour: bool = False, piece: int = 3) -> str:
    """The screen after `text` came in small pieces."""
    out: list[str] = []
    stream = MarkdownStream(out.append, width, colour=colour)
    for start in range(0, len(text), piece):
        stream.feed(text[start : start + piece])
    stream.finish()
    return "".join(out)


@pytest.mark.parametrize("piece", [1, 3, 1000])
def test_words_are_never_broken_and_lists_are_indented(piece: int) -> None:
    text = "A sentence that is rather longer than one line.\n\n- an item that is also longer than a line\n"
    lines = shown(text, piece=piece).split("\n")
    assert all(len(line) <= 30 for line in lines)
    assert " ".join(" ".join(lines).split()) == " ".join(text.split())
    assert any(line.startswith("  ") for line in lines[3:])


def test_code_is_neither_wrapped_nor_changed() -> None:
    text = "```python\nx = '**not bold**'  # a long line of code that stays as it is\n```\n"
    assert shown(text) == text
    assert _COLOUR.sub("", shown(text, colour=True)) == text


def test_markers_become_colours() -> None:
    assert shown("A **bold** word and `code`.\n", colour=True, piece=1).count("**") == 0
    assert "\033[1mbold\033[0m" in shown("A **bold** word.", colour=True, piece=1)
    assert _COLOUR.sub("", shown("# Title\n`a * b`\n", colour=True)) == "Title\na * b\n"
    assert shown("# Title **x**\n") == "# Title **x**\n"


def test_wide_characters_wrap_at_the_width() -> None:
    lines = shown("汉" * 40, width=20).strip().split("\n")
    assert {len(line) for line in lines} == {10}


def test_an_image_goes_with_the_next_message_only(tmp_path: Path) -> None:
    picture, text = tmp_path / "a.png", tmp_path / "a.txt"
    picture.write_bytes(b"\x89PNG")
    text.write_text("x")
    conversation = Conversation()
    assert run_slash(f"/image {picture}", conversation, {}, "m", "").image == str(picture)
    assert "not an image" in conversation.attach(text)
    assert "Cannot read" in conversation.attach(tmp_path / "none.png")
    assert conversation.attach(picture) == "a.png goes with your next message."
    conversation.add_user_message("What is this?")
    conversation.add_answer("A picture.")
    conversation.add_user_message("Sure?")
    first, _, last = conversation.messages
    assert [part["type"] for part in first["content"]] == ["image_url", "text"]
    assert first["content"][0]["image_url"]["url"] == "data:image/png;base64,iVBORw=="
    assert last["content"] == "Sure?"
    saved = tmp_path / "saved.json"
    conversation.save(saved)
    again = Conversation()
    again.load(saved)
    assert again.turns == conversation.turns
    conversation.save(tmp_path / "saved.md")
    assert "(image)\nWhat is this?" in (tmp_path / "saved.md").read_text()
    conversation.attach(picture)
    run_slash("/clear", conversation, {}, "m", "")
    conversation.add_user_message("Hello.")
    assert conversation.messages == [{"role": "user", "content": "Hello."}]
