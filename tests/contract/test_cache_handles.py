"""Prompts that stay cached: /v1/cache, `millrace cache`, `cache_control` and `prompt_cache_retention`, with tenants."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from contract.real_server import RealServer, real_server
from helpers.tiny_server import NAME, tiny_options
from serve.wire import CHAT, Reply, request

from millrace.cli import main
from millrace.serve.tenancy.keyring import digest_of

pytestmark = pytest.mark.live
COMPLETIONS = "/v1/completions"
CACHE = "/v1/cache"
LIMITS = {"acme": "", "small": "cache_mib = 1", "boss": "operator = true"}
KV_TOKENS = 4096


def ask(server: RealServer, who: str, method: str, path: str, body: Any = None) -> Reply:
    return request(server.port, method, path, body, headers={"Authorization": f"Bearer key-{who}"})


def prompt_of(number: int, length: int = 160) -> list[int]:
    return [300 + (number * 37 + place * (number + 5)) % 3000 for place in range(length)]


def flood(server: RealServer) -> None:
    """Prompts that fill the pool twice."""
    for number in range(16):
        body = {"model": NAME, "prompt": prompt_of(100 + number, 512), "max_tokens": 1}
        assert ask(server, "acme", "POST", COMPLETIONS, body).status == 200


def cached(server: RealServer, who: str, prompt: list[int]) -> int:
    body = {"model": NAME, "prompt": [*prompt, 7], "max_tokens": 1}
    usage = ask(server, who, "POST", COMPLETIONS, body).json["usage"]
    return int(usage["prompt_tokens_details"]["cached_tokens"])


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServer]:
    directory = tmp_path_factory.mktemp("cache")
    keys = directory / "keys.toml"
    keys.write_text(
        "".join(
            f'[tenants.{name}]\nkeys = ["sha256:{digest_of(f"key-{name}").hex()}"]\n{more}\n'
            for name, more in LIMITS.items()
        )
    )
    options = [*tiny_options(directory), "--keys-file", str(keys)]
    options[options.index("--kv-tokens") + 1] = str(KV_TOKENS)
    with ExitStack() as stack:
        yield stack.enter_context(real_server(*options))


def test_a_kept_prompt_survives_what_evicts_others(server: RealServer) -> None:
    made = ask(server, "acme", "POST", CACHE, {"prompt": prompt_of(1), "name": "manual", "ttl_s": 600})
    assert made.status == 200, made.body
    assert made.json["tokens"] == made.json["created_tokens"] == 160
    assert made.json["cached_tokens"] == 0
    assert ask(server, "acme", "POST", COMPLETIONS, {"prompt": prompt_of(2), "max_tokens": 1}).status == 200
    flood(server)
    assert cached(server, "acme", prompt_of(1)) == 160
    assert cached(server, "acme", prompt_of(2)) == 0
    listed = ask(server, "acme", "GET", CACHE).json
    [one] = listed["data"]
    assert (one["id"], one["tenant"], one["resident_tokens"], one["is_hint"]) == ("manual", "acme", 160, False)
    assert 0 < one["bytes"] == listed["used_bytes"] <= listed["max_bytes"]
    again = ask(server, "acme", "POST", CACHE, {"prompt": prompt_of(1), "name": "manual", "ttl_s": 900}).json
    assert (again["tokens"], again["created_tokens"] + again["cached_tokens"]) == (160, 160)
    assert ask(server, "acme", "GET", f"{CACHE}/manual").json["ttl_s"] == 900


def test_no_tenant_sees_or_ends_what_another_keeps(server: RealServer) -> None:
    ask(server, "acme", "POST", CACHE, {"prompt": prompt_of(3), "name": "mine"})
    assert ask(server, "small", "GET", CACHE).json["data"] == []
    assert ask(server, "small", "GET", f"{CACHE}/mine").status == 404
    assert ask(server, "small", "DELETE", f"{CACHE}/mine").status == 404
    assert ask(server, "small", "DELETE", f"{CACHE}/mine?tenant=acme").status == 404
    assert cached(server, "small", prompt_of(3)) == 0
    assert "mine" in [one["id"] for one in ask(server, "boss", "GET", CACHE).json["data"]]
    assert ask(server, "boss", "DELETE", f"{CACHE}/mine?tenant=acme").json["deleted"] is True
    assert ask(server, "acme", "DELETE", f"{CACHE}/mine").status == 404


def test_full_is_refused(server: RealServer) -> None:
    refused = ask(server, "acme", "POST", CACHE, {"prompt": prompt_of(4, 2000), "name": "large"})
    assert (refused.status, refused.error["code"]) == (429, "cache_full")
    assert "2000 tokens do not fit: at most " in refused.error["message"]
    assert "large" not in [one["id"] for one in ask(server, "acme", "GET", CACHE).json["data"]]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompt": "a", "messages": []}, "prompt"),
        ({}, "prompt"),
        ({"prompt": "a", "ttl_s": 0}, "ttl_s"),
        ({"prompt": "a", "name": "a b"}, "name"),
        ({"prompt": ["a", "b"]}, "prompt"),
        ({"prompt": "a", "tools": []}, "tools"),
        ({"prompt": "Short"}, "prompt"),
    ],
)
def test_what_cannot_be_kept_is_refused(server: RealServer, body: dict[str, Any], param: str) -> None:
    reply = ask(server, "acme", "POST", CACHE, body)
    assert (reply.status, reply.error["param"]) == (400, param)


def test_cache_control_keeps_the_prompt_up_to_its_block(server: RealServer) -> None:
    text = "Read this manual with care. " * 12
    marked = {"type": "text", "text": text, "cache_control": {"type": "ephemeral", "ttl": "1h"}}
    message = {"model": NAME, "max_tokens": 2, "system": [marked]}
    first = ask(server, "acme", "POST", "/v1/messages", {**message, "messages": [{"role": "user", "content": "One?"}]})
    assert first.status == 200, first.body
    usage = first.json["usage"]
    kept = usage["cache_creation_input_tokens"]
    assert kept > 256
    assert usage["cache_read_input_tokens"] == 0
    flood(server)
    second = ask(server, "acme", "POST", "/v1/messages", {**message, "messages": [{"role": "user", "content": "Two?"}]})
    usage = second.json["usage"]
    assert (usage["cache_read_input_tokens"], usage["cache_creation_input_tokens"]) == (kept, 0)
    assert usage["input_tokens"] < 64
    hints = [one for one in ask(server, "acme", "GET", CACHE).json["data"] if one["is_hint"]]
    assert [one["ttl_s"] for one in hints] == [3600]
    wrong = {**marked, "cache_control": {"type": "ephemeral", "ttl": "2h"}}
    reply = ask(
        server,
        "acme",
        "POST",
        "/v1/messages",
        {**message, "system": [wrong], "messages": [{"role": "user", "content": "x"}]},
    )
    assert reply.status == 400
    assert ask(server, "acme", "DELETE", f"{CACHE}/{hints[0]['id']}").status == 200


def test_prompt_cache_retention_keeps_a_conversation_under_its_key(server: RealServer) -> None:
    turns = [{"role": "user", "content": "Tell me about rivers. " * 8}]
    fields = {"model": NAME, "max_tokens": 2, "prompt_cache_key": "talk 1", "prompt_cache_retention": "24h"}
    for _ in range(2):
        assert ask(server, "acme", "POST", CHAT, {**fields, "messages": turns}).status == 200
        turns = [*turns, {"role": "assistant", "content": "They flow."}, {"role": "user", "content": "And lakes?"}]
    kept = [one for one in ask(server, "acme", "GET", CACHE).json["data"] if one["id"] == "key-talk 1"]
    assert [(one["ttl_s"], one["is_hint"]) for one in kept] == [(86400, True)]
    assert ask(server, "acme", "DELETE", f"{CACHE}/key-talk%201").status == 200


def test_the_command(server: RealServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "manual.txt"
    file.write_text("How to row a boat. " * 10)
    here = ["--url", server.url, "--api-key", "key-acme"]
    assert main(["cache", "warm", "boat", "--file", str(file), *here]) == 0
    assert "tokens kept" in capsys.readouterr().out
    assert main(["cache", "ls", *here]) == 0
    assert "boat" in capsys.readouterr().out
    assert main(["cache", "tree", *here]) == 1
    assert "use an operator's key" in capsys.readouterr().err
    operator = ["--url", server.url, "--api-key", "key-boss"]
    assert main(["cache", "tree", *operator]) == 0
    printed = capsys.readouterr().out
    assert " kept" in printed.partition("prefix")[2]
    assert "tokens in blocks of" in printed
    assert main(["cache", "tree", "--json", *operator]) == 0
    printed = capsys.readouterr().out
    found = json.loads(printed)
    kept = [one for one in found["nodes"] if one["state"] == "kept"]
    assert kept
    assert all(one["owner"] for one in kept)
    assert "acme" not in printed  # Tenants are not named.
    assert "boat" not in printed
    for nodes in ("0", "2001", "x"):
        assert ask(server, "boss", "GET", f"/v1/kv/tree?nodes={nodes}").status == 400
    assert main(["cache", "show", "boat", "--json", *here]) == 0
    assert json.loads(capsys.readouterr().out)["tenant"] == "acme"
    assert main(["cache", "rm", "boat", *here]) == 0
    assert "no longer kept" in capsys.readouterr().out
    assert main(["cache", "rm", "boat", *here]) == 1
    assert "no cache handle" in capsys.readouterr().err
    assert main(["cache", "warm", *here]) == 2
    assert main(["cache", "warm", "boat", *here]) == 2
    assert main(["cache", "what", *here]) == 2
