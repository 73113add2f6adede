"""Training data from a server's answers."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from millrace.cli import main
from millrace.model_router.asking import quality
from millrace.model_router.examples import read_examples


@pytest.mark.parametrize(
    ("answer", "expected", "is_right"),
    [
        ("It is 1,200 and so 42.", "42", True),
        ("42 of 1,200", "42", False),
        ("B. Water", "B", True),
        ("The answer is B", "B", False),
        ("In the city of New  York!", ["Rome", "new york"], True),
        ("newyork", "new york", False),
        ("", "x", False),
        ("-3", "-3.0", True),
    ],
)
def test_answers_are_compared_with_what_is_expected(answer: str, expected: str | list[str], is_right: bool) -> None:
    assert quality(answer, expected) == float(is_right)


class _Answers(BaseHTTPRequestHandler):
    """The large model is right, the small one is not."""

    def do_POST(self) -> None:
        asked: dict[str, Any] = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert (asked["temperature"], asked["logprobs"], asked["max_tokens"]) == (0, True, 4)
        text = "7" if asked["model"] == "large" else "8"
        choice = {"message": {"content": text}, "logprobs": {"content": [{"logprob": -0.5}]}}
        known = asked["model"] in ("small", "large")
        body = json.dumps({"choices": [choice], "usage": {"total_tokens": 11}} if known else {"error": "no model"})
        self.send_response(200 if known else 404)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body.encode())

    def log_message(self, *args: object) -> None:
        pass


@pytest.mark.live
def test_both_models_of_a_server_answer_and_the_lines_can_be_trained_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    questions, answers = tmp_path / "questions.jsonl", tmp_path / "answers.jsonl"
    made = [{"messages": [{"role": "user", "content": f"{n}"}], "expected": "7", "max_tokens": 4} for n in range(3)]
    questions.write_text("".join(json.dumps(one) + "\n" for one in made))
    server = HTTPServer(("127.0.0.1", 0), _Answers)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    options = ["--url", f"http://127.0.0.1:{server.server_port}", "--file", str(answers)]
    try:
        ask = ["router", "ask", str(questions), *options, "--small", "small", "--large"]
        assert main([*ask, "large"]) == 0
        assert "of 3 questions 0 were answered right by small, 3 by large" in capsys.readouterr().out
        found = read_examples(answers)
        assert [(one.small, one.large, one.confidence, one.small_tokens) for one in found] == [(0, 1, 0.6065, 11)] * 3
        assert main([*ask, "lost"]) != 0
        assert "'lost' answered 404" in capsys.readouterr().err
        questions.write_text('{"messages": []}\n')
        assert main([*ask, "large"]) != 0
        assert "line 1" in capsys.readouterr().err
    finally:
        server.shutdown()
        server.server_close()
