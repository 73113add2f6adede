"""A thousand generated requests to the real engine with a tiny random model, over every endpoint that generates.

Each has a random combination of valid parameters. It is answered, streamed and whole with the same text and as the
OpenAPI document says, or refused with an error that names the field. The same requests are sent in every run;
`FUZZ_REQUESTS=50000` sends more, `FUZZ_SEED=7` others. A request that failed is kept in `KEPT`.
"""

from __future__ import annotations

import json
import os
import random
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from contract.real_server import TINY, TINY_VOCAB, RealServer, real_server, tiny_model
from contract.schema_check import DOCUMENT, problems, schemas
from helpers.suite import SEED
from serve.wire import CHAT, COMPLETIONS, Reply, chat_text, completion_text, events, get, post

pytestmark = pytest.mark.live

SIZE = int(os.environ.get("FUZZ_REQUESTS", "1000"))
"""Of the first request; each further one adds one."""
THREADS = 8


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServer]:
    with real_server(*tiny_model(tmp_path_factory.mktemp("tiny"))) as running:
        yield running
        assert get(running.port, "/ready").status == 200
        assert get(running.port, "/v1/requests").json["data"] == []


# ── drawing requests ──────────────────────────────────────────────────────────────────────────────────────────────────
class Draw:
    """Random valid values from one seed."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def some(self, choices: dict[str, Callable[[], Any]]) -> dict[str, Any]:
        """Each field with probability 1/4."""
        return {name: make() for name, make in choices.items() if self.random.random() < 0.25}

    def text(self) -> str:
        alphabet = "abc xyz,.é時🌊\n"
        return "".join(self.random.choices(alphabet, k=self.random.randint(1, 12)))

    def messages(self) -> list[dict[str, Any]]:
        turns = [{"role": "user", "content": self.text()} for _ in range(self.random.randint(1, 2))]
        if self.random.random() < 0.3:
            turns.insert(0, {"role": self.random.choice(("system", "developer")), "content": self.text()})
        if self.random.random() < 0.2:
            turns[-1]["content"] = [{"type": "text", "text": self.text()}]
        return turns

    def prompt(self) -> Any:
        ids = [self.random.randrange(TINY_VOCAB) for _ in range(self.random.randint(1, 8))]
        return self.random.choice((self.text(), [self.text(), self.text()], ids, [ids, ids[:1]]))

    def sampling(self) -> dict[str, Any]:
        pick, uniform, integer = self.random.choice, self.random.uniform, self.random.randint
        fields = self.some(
            {
                "top_p": lambda: pick((None, 1, round(uniform(0.05, 1), 3))),
                "top_k": lambda: pick((-1, 0, 1, 5, 400)),
                "min_p": lambda: round(uniform(0, 1), 3),
                "presence_penalty": lambda: round(uniform(-2, 2), 2),
                "frequency_penalty": lambda: round(uniform(-2, 2), 2),
                "repetition_penalty": lambda: round(uniform(0.5, 2), 2),
                "stop": lambda: pick((None, "e", ["zz", "a"], [])),
                "stop_token_ids": lambda: [integer(0, TINY_VOCAB - 1)],
                "ignore_eos": lambda: pick((True, False, None)),
                "min_tokens": lambda: pick((0, 1)),
                "include_stop_str_in_output": lambda: pick((True, False)),
                "skip_special_tokens": lambda: pick((True, False, None)),
                "priority": lambda: pick(("interactive", "batch", 1, None)),
                "cache_salt": self.text,
                "timeout": lambda: 60,
                "metadata": lambda: {"k": self.text()},
                "user": self.text,
            }
        )
        # Greedy or seeded, because the streamed answer must equal the whole one.
        return {**fields, **pick(({"temperature": 0}, {"temperature": 1.5, "seed": integer(0, 99)}, {"seed": 7}))}

    def chat_like(self) -> dict[str, Any]:
        pick = self.random.choice
        return self.some(
            {
                "logit_bias": lambda: {str(self.random.randrange(TINY_VOCAB)): pick((-100, 3.5, 100))},
                "bad_words": lambda: pick((None, [], ["e"], ["the", self.text()])),
                "n": lambda: pick((1, 2, 3, None)),
                "return_token_ids": lambda: pick((True, False)),
                "truncate_prompt_tokens": lambda: pick((None, -1, 1, 5)),
                "prompt_logprobs": lambda: pick((None, 0, 2)),
            }
        )


Request = tuple[str, dict[str, Any]]


def chat_request(draw: Draw) -> Request:
    pick = draw.random.choice
    own = draw.some(
        {
            "logprobs": lambda: pick((True, False)),
            "add_generation_prompt": lambda: pick((True, False, None)),
            "continue_final_message": lambda: pick((True, False, None)),
            "chat_template_kwargs": lambda: {"a": 1},
            "response_format": lambda: pick((None, {"type": "text"}, {"type": "json_object"})),
            "tools": lambda: pick((None, [], [{"type": "function", "function": {"name": "f"}}])),
            "reasoning_effort": lambda: pick((None, "none", "low")),
            "store": lambda: pick((None, False, True)),
            "top_logprobs": lambda: pick((0, 2)),
        }
    )
    limit = {pick(("max_tokens", "max_completion_tokens")): pick((1, 2, 3, 3, 500))}
    return CHAT, {"messages": draw.messages(), **draw.sampling(), **draw.chat_like(), **own, **limit}


def completion_request(draw: Draw) -> Request:
    pick = draw.random.choice
    own = draw.some(
        {
            "logprobs": lambda: pick((None, 0, 3)),
            "echo": lambda: pick((True, False)),
            "best_of": lambda: pick((1, 2, 3)),
            "suffix": lambda: pick((None, "", "x")),
            "add_special_tokens": lambda: pick((True, False)),
        }
    )
    return COMPLETIONS, {
        "prompt": draw.prompt(),
        "max_tokens": pick((0, 1, 2, 3, 500)),
        **draw.sampling(),
        **draw.chat_like(),
        **own,
    }


def response_request(draw: Draw) -> Request:
    pick = draw.random.choice
    own = draw.some(
        {
            "instructions": draw.text,
            "store": lambda: pick((True, False, None)),
            "include": lambda: pick(([], ["message.output_text.logprobs"])),
            "top_logprobs": lambda: pick((0, 2)),
            "reasoning": lambda: pick((None, {}, {"effort": "high"})),
            "truncation": lambda: pick(("disabled", "auto")),
            "text": lambda: {"format": {"type": "text"}},
        }
    )
    given = pick((draw.text(), [{"role": "user", "content": [{"type": "input_text", "text": draw.text()}]}]))
    return "/v1/responses", {"input": given, "max_output_tokens": pick((1, 2, 3, 500)), **draw.sampling(), **own}


def anthropic_request(draw: Draw) -> Request:
    pick = draw.random.choice
    own = draw.some(
        {
            "system": draw.text,
            "stop_sequences": lambda: pick(([], ["a", "b"])),
            "top_k": lambda: pick((0, 3)),
            "top_p": lambda: pick((0.5, 1)),
            "thinking": lambda: pick(({"type": "disabled"}, {"type": "enabled", "budget_tokens": 1024})),
            "metadata": lambda: {"user_id": draw.text()},
        }
    )
    messages = [{"role": "user", "content": draw.text()}]
    return "/v1/messages", {"messages": messages, "max_tokens": pick((1, 2, 3, 500)), "temperature": 0, **own}


def ollama_request(draw: Draw) -> Request:
    pick = draw.random.choice
    own = draw.some(
        {
            "logprobs": lambda: pick((True, False)),
            "keep_alive": lambda: pick(("5m", -1, 0)),
            "format": lambda: pick((None, "", "json")),
            "think": lambda: pick((None, False, True)),
        }
    )
    options = draw.some(
        {
            "top_k": lambda: pick((0, 3)),
            "num_ctx": lambda: pick((8, 64, 4096)),
            "repeat_penalty": lambda: 1.1,
            "stop": lambda: ["a"],
            "mirostat": lambda: pick((0, 1)),
        }
    )
    body = {"options": {"temperature": 0, "num_predict": pick((1, 2, 3, 500)), **options}, **own}
    if pick((True, False)):
        return "/api/chat", {"messages": [{"role": "user", "content": draw.text()}], **body}
    return "/api/generate", {"prompt": draw.text(), "raw": pick((True, False)), **body}


KINDS = (chat_request, chat_request, completion_request, completion_request)
KINDS += (response_request, anthropic_request, ollama_request)
ANSWERS = {
    CHAT: ("ChatAnswer", "ChatChunk"),
    COMPLETIONS: ("CompletionAnswer", "CompletionChunk"),
    "/v1/responses": ("ResponseAnswer", "ResponseEvent"),
    "/v1/messages": ("MessageAnswer", "MessageEvent"),
    "/api/chat": ("OllamaAnswer", "OllamaAnswer"),
    "/api/generate": ("OllamaAnswer", "OllamaAnswer"),
}
OPENAI_ANSWERS = {CHAT: "CreateChatCompletionResponse", COMPLETIONS: "CreateCompletionResponse"}
"""Names in OpenAI's own document."""
ENDINGS = {"stop", "length"}
KEPT: list[Request] = [
    (CHAT, {"messages": [{"role": "user", "content": "a"}], "max_tokens": 3, "n": 3, "seed": 7, "stop": ["zz", "a"]}),
    (COMPLETIONS, {"prompt": [298], "max_tokens": 0, "echo": True, "logprobs": 0, "temperature": 0}),
]
"""Sent in every run, whatever the seed. What `make fuzz` finds is added here."""


# ── checking answers ──────────────────────────────────────────────────────────────────────────────────────────────────
class Checker:
    def __init__(self, port: int) -> None:
        self.port = port
        self.schemas = get(port, "/openapi.json").json["components"]["schemas"]

    def send(self, seed: int) -> str:
        """Send the request of one seed. Returns "answered" or "refused"."""
        draw = Draw(seed)
        path, body = draw.random.choice(KINDS)(draw)
        try:
            return self.check(path, body)
        except AssertionError as error:
            raise AssertionError(f"Repeat with FUZZ_SEED={seed} FUZZ_REQUESTS=1: {error}") from error

    def check(self, path: str, body: dict[str, Any]) -> str:
        """Send one request, whole and, if it is answered, streamed. Returns "answered" or "refused"."""
        body = {"model": TINY, **body}
        reply = post(self.port, path, {**body, "stream": False})
        try:
            if reply.status == 200:
                self.check_answer(path, body, reply)
                return "answered"
            self.check_refusal(path, body, reply)
            return "refused"
        except AssertionError as error:
            raise AssertionError(f"POST {path} {json.dumps(body)}: {reply.body[:2000]!r}: {error}") from error

    def check_refusal(self, path: str, body: dict[str, Any], reply: Reply) -> None:
        assert reply.status == 400
        name = {"/v1/messages": "AnthropicErrorAnswer"}.get(path, "ErrorAnswer")
        name = "OllamaErrorAnswer" if path.startswith("/api/") else name
        assert problems(reply.json, self.schemas[name], self.schemas) == []
        error = reply.json["error"] if isinstance(reply.json["error"], dict) else reply.json
        assert error["param"].partition(".")[0] in body, "the error names a field that was sent"
        assert error["param"].rpartition(".")[2] in error["message"] or "prompt" in error["message"]

    def check_answer(self, path: str, body: dict[str, Any], reply: Reply) -> None:
        whole, chunk = ANSWERS[path]
        assert problems(reply.json, self.schemas[whole], self.schemas) == []
        # The log-probability of an echoed first token is null, as in OpenAI's answers, though not in its schema.
        is_scored = bool(body.get("echo")) and body.get("logprobs") is not None
        if path in OPENAI_ANSWERS and DOCUMENT.exists() and not is_scored:
            assert problems(reply.json, {"$ref": OPENAI_ANSWERS[path]}, schemas()) == []
        if body.get("prompt_logprobs") is not None or (body.get("best_of") or 1) > (body.get("n") or 1):
            return  # Refused with `stream`, as documented.
        streamed = post(self.port, path, {**body, "stream": True})
        pieces = _pieces(path, streamed)
        for piece in pieces:
            assert problems(piece, self.schemas[chunk], self.schemas) == []
        assert streamed_text(path, pieces) == whole_text(path, reply.json)
        if path in (CHAT, COMPLETIONS):
            _check_choices(path, body, reply.json)


def _check_choices(path: str, body: dict[str, Any], answer: dict[str, Any]) -> None:
    prompt = body.get("prompt")
    many = isinstance(prompt, list) and not isinstance(prompt[0], int)
    prompts = len(prompt) if isinstance(prompt, list) and many else 1
    assert [choice["index"] for choice in answer["choices"]] == list(range(prompts * (body.get("n") or 1)))
    assert {choice["finish_reason"] for choice in answer["choices"]} <= ENDINGS
    usage = answer["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    limit = body.get("max_tokens", body.get("max_completion_tokens"))
    assert usage["completion_tokens"] <= limit * len(answer["choices"])
    if path == CHAT and body.get("logprobs"):
        entries = [entry for choice in answer["choices"] for entry in choice["logprobs"]["content"]]
        assert all(len(entry["top_logprobs"]) == (body.get("top_logprobs") or 0) for entry in entries)
        assert all(bytes(entry["bytes"]).decode("utf-8", "replace") == entry["token"] for entry in entries)


def _pieces(path: str, reply: Reply) -> list[dict[str, Any]]:
    if path in (CHAT, COMPLETIONS):
        return events(reply)
    assert reply.status == 200, reply.body
    lines = reply.body.decode().split("\n")
    if path.startswith("/api/"):
        return [json.loads(line) for line in lines if line]
    return [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: ")]


def whole_text(path: str, answer: dict[str, Any]) -> list[str]:
    if path == CHAT:
        return [choice["message"]["content"] for choice in answer["choices"]]
    if path == COMPLETIONS:
        return [choice["text"] for choice in answer["choices"]]
    if path == "/v1/responses":
        return [part["text"] for part in answer["output"][0]["content"]]
    if path == "/v1/messages":
        return ["".join(block["text"] for block in answer["content"])]
    return [answer["response"] if "response" in answer else answer["message"]["content"]]


def streamed_text(path: str, pieces: list[dict[str, Any]]) -> list[str]:
    if path in (CHAT, COMPLETIONS):
        indexes = sorted({choice["index"] for piece in pieces for choice in piece["choices"]})
        return [(chat_text if path == CHAT else completion_text)(pieces, index) for index in indexes]
    if path == "/v1/responses":
        return ["".join(piece["delta"] for piece in pieces if piece["type"] == "response.output_text.delta")]
    if path == "/v1/messages":
        return ["".join(piece["delta"]["text"] for piece in pieces if piece["type"] == "content_block_delta")]
    return ["".join(piece["response"] if "response" in piece else piece["message"]["content"] for piece in pieces)]


@pytest.mark.parametrize(("path", "body"), KEPT)
def test_kept_requests(server: RealServer, path: str, body: dict[str, Any]) -> None:
    Checker(server.port).check(path, body)


def test_generated_requests(server: RealServer) -> None:
    checker = Checker(server.port)
    with ThreadPoolExecutor(THREADS) as pool:
        outcomes = Counter(pool.map(checker.send, range(SEED, SEED + SIZE)))
    assert outcomes.total() == SIZE
    if SIZE >= 1000:  # A repeated request is one or the other.
        assert outcomes["answered"] > SIZE // 4, "many combinations are valid"
        assert outcomes["refused"] > SIZE // 20, "some are refused by name"
