"""Kept prompts and sessions as signed files: they move between replicas of a model, and nothing else gets in."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
import pytest
from contract.real_server import RealServer, real_server
from helpers.tiny_server import NAME, tiny_options
from serve.wire import Reply, request

from millrace.cli import main
from millrace.serve.tenancy.keyring import digest_of
from millrace.serve.transfer.kv_file import MAGIC, KvFileHeader, KvFileWriter

pytestmark = pytest.mark.live
CACHE, SESSIONS, COMPLETIONS = "/v1/cache", "/v1/sessions", "/v1/completions"
PROMPT = [300 + (place * 7) % 3000 for place in range(160)]
KEY = b"k" * 40


def ask(server: RealServer, method: str, path: str, body: Any = None, who: str = "acme") -> Reply:
    return request(server.port, method, path, body, headers={"Authorization": f"Bearer key-{who}"})


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, RealServer]]:
    directory = tmp_path_factory.mktemp("files")
    keys, signing = directory / "keys.toml", directory / "signing.key"
    tenants = {"acme": "", "other": "", "small": "cache_mib = 1"}
    keys.write_text(
        "".join(
            f'[tenants.{one}]\nkeys = ["sha256:{digest_of(f"key-{one}").hex()}"]\n{more}\n'
            for one, more in tenants.items()
        )
    )
    signing.write_text("k" * 40)
    with ExitStack() as stack:
        made = {}
        for name in ("one", "two"):
            own = directory / name
            own.mkdir()
            options = [*tiny_options(own), "--keys-file", str(keys), "--kv-export-key", str(signing), "--in-process"]
            options[0] = tiny_options(directory)[0]  # One model.
            options[options.index("--kv-tokens") + 1] = "4096"
            made[name] = stack.enter_context(real_server(*options))
        yield made


@pytest.fixture(scope="module")
def file(servers: dict[str, RealServer]) -> bytes:
    one = servers["one"]
    assert ask(one, "POST", CACHE, {"prompt": PROMPT, "name": "manual", "ttl_s": 600}).status == 200
    exported = ask(one, "GET", f"{CACHE}/manual/export")
    assert exported.status == 200, exported.body
    return exported.body


def complete(server: RealServer, who: str = "acme") -> tuple[int, str]:
    body = {"model": NAME, "prompt": [*PROMPT, 9, 8, 7], "max_tokens": 12, "temperature": 0}
    reply = ask(server, "POST", COMPLETIONS, body, who).json
    return reply["usage"]["prompt_tokens_details"]["cached_tokens"], reply["choices"][0]["text"]


def test_an_imported_prompt_is_computed_no_more_and_gives_the_same_tokens(
    servers: dict[str, RealServer], file: bytes
) -> None:
    two = servers["two"]
    without = complete(two, "other")
    assert without[0] == 0
    # As curl sends large files: it asks first.
    sent = {"Authorization": "Bearer key-acme", "Content-Type": "application/octet-stream", "Expect": "100-continue"}
    made = request(two.port, "POST", f"{CACHE}/import?name=here", file, headers=sent)
    assert made.status == 200, made.body
    assert (made.json["id"], made.json["tokens"], made.json["ttl_s"]) == ("here", 160, 600)
    shown = ask(two, "GET", f"{CACHE}/here").json
    assert (shown["tokens"], shown["resident_tokens"]) == (160, 160)
    assert complete(two) == (160, without[1])
    assert ask(two, "GET", f"{CACHE}/here", who="other").status == 404
    assert ask(two, "DELETE", f"{CACHE}/here").status == 200


def test_a_session_goes_on_elsewhere(servers: dict[str, RealServer]) -> None:
    one, two = servers["one"], servers["two"]
    turn = {"messages": [{"role": "user", "content": "Tell me more. " * 12}], "max_tokens": 8, "temperature": 0}
    ask(one, "POST", SESSIONS, {"id": "boats", "system": "Read with care. " * 8})
    assert ask(one, "POST", f"{SESSIONS}/boats/turns", turn).status == 200
    moved = ask(one, "GET", f"{SESSIONS}/boats/export")
    assert moved.status == 200, moved.body
    assert ask(two, "POST", f"{CACHE}/import", moved.body).error["code"] == "kv_file_session"
    made = ask(two, "POST", f"{SESSIONS}/import", moved.body)
    assert made.status == 200, made.body
    kept, tokens = made.json["kv"]["tokens"], made.json["tokens"]
    assert kept == (tokens - 1) // 16 * 16 > 64
    again = [ask(server, "POST", f"{SESSIONS}/boats/turns", turn) for server in (one, two)]
    counts = [dict(part.split("=") for part in reply.headers["x-session-turn"].split("; ")) for reply in again]
    assert counts[0] == counts[1]
    assert int(counts[1]["computed"]) == int(counts[1]["prompt"]) - kept
    texts = [reply.json["choices"][0]["message"]["content"] for reply in again]
    assert texts[0] == texts[1]
    assert ask(two, "POST", f"{SESSIONS}/import", moved.body).status == 409
    assert [ask(server, "DELETE", f"{SESSIONS}/boats").status for server in (one, two)] == [200, 200]


def _cut(file: bytes) -> bytes:
    return file[:-40]


def _changed(file: bytes, at: int) -> bytes:
    return file[:at] + bytes([file[at] ^ 1]) + file[at + 1 :]


def headed(file: bytes, **fields: Any) -> bytes:
    """The file with another header, signed with the operator's key."""
    start = len(MAGIC) + 4
    (length,) = struct.unpack_from("<I", file, len(MAGIC))
    header = msgspec.msgpack.decode(file[start : start + length], type=KvFileHeader)
    return KvFileWriter(KEY).header(msgspec.structs.replace(header, **fields))


def test_what_was_changed_cut_or_made_elsewhere_is_refused_by_name(servers: dict[str, RealServer], file: bytes) -> None:
    two = servers["two"]
    huge = file[:14] + struct.pack("<I", 1 << 31)
    for sent, code in (
        (b"text", "kv_file_unknown"),
        (b"", "kv_file_unknown"),
        (file[:10], "kv_file_unknown"),
        (_cut(file), "kv_file_truncated"),
        (file[:200], "kv_file_truncated"),
        (_changed(file, 60), "kv_file_tampered"),
        (_changed(file, len(file) // 2), "kv_file_tampered"),
        (_changed(file, len(file) - 1), "kv_file_tampered"),
        (file + b"x", "kv_file_tampered"),
        (huge, "kv_file_tampered"),
    ):
        reply = ask(two, "POST", f"{CACHE}/import?name=bad", sent)
        assert (reply.status, reply.error["code"]) == (400, code), reply.body
    assert ask(two, "POST", f"{CACHE}/import", file, "other").error["code"] == "kv_file_other_tenant"
    for fields, code in (
        ({"identity": "another"}, "kv_file_other_model"),
        ({"layout": "cpu int8"}, "kv_file_other_format"),
        ({"block_tokens": 32}, "kv_file_other_format"),
        ({"num_parts": 900}, "kv_file_other_format"),
    ):
        assert ask(two, "POST", f"{CACHE}/import?name=bad", headed(file, **fields)).error["code"] == code
    assert "bad" not in [handle["id"] for handle in ask(two, "GET", CACHE).json["data"]]
    assert ask(two, "GET", f"{CACHE}/none/export").status == 404
    assert ask(servers["one"], "GET", f"{CACHE}/manual/export", who="other").status == 404


def test_what_finds_no_room_is_refused_whole(servers: dict[str, RealServer]) -> None:
    """The same tenant may keep less on another replica, whose handles have taken the room."""
    one, two = servers["one"], servers["two"]
    long = [300 + (place * 11) % 3000 for place in range(600)]
    assert ask(one, "POST", CACHE, {"prompt": long, "name": "long"}).status == 200
    moved = ask(one, "GET", f"{CACHE}/long/export").body
    assert ask(one, "DELETE", f"{CACHE}/long").status == 200
    assert ask(two, "POST", CACHE, {"prompt": long[::-1], "name": "taken"}).status == 200
    reply = ask(two, "POST", f"{CACHE}/import", moved)
    assert (reply.status, reply.error["code"]) == (429, "cache_full")
    assert "long" not in [handle["id"] for handle in ask(two, "GET", CACHE).json["data"]]
    assert ask(two, "DELETE", f"{CACHE}/taken").status == 200


def test_the_commands(
    servers: dict[str, RealServer], file: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one, two = ([*("--url", servers[name].url), "--api-key", "key-acme"] for name in ("one", "two"))
    saved = tmp_path / "manual.kv"
    assert main(["cache", "export", "manual", "--file", str(saved), *one]) == 0
    assert saved.stat().st_size == len(file)
    assert main(["cache", "import", "copy", "--file", str(saved), *two]) == 0
    assert "copy: 160 tokens kept" in capsys.readouterr().out
    assert main(["cache", "rm", "copy", *two]) == 0
    assert main(["cache", "import", "copy", *two]) == 2
    assert main(["cache", "export", "none", "--file", str(saved), *two]) == 1
    assert "no cache handle" in capsys.readouterr().err
    assert main(["sessions", "new", "talk", *one]) == 0
    turn = {"messages": [{"role": "user", "content": "Hello. " * 20}], "max_tokens": 2}
    assert ask(servers["one"], "POST", f"{SESSIONS}/talk/turns", turn).status == 200
    assert main(["sessions", "ls", *one]) == 0
    assert "talk" in capsys.readouterr().out
    assert main(["sessions", "export", "talk", "--file", str(saved), *one]) == 0
    assert main(["sessions", "import", "talk-2", "--file", str(saved), *two]) == 0
    assert main(["sessions", "fork", "talk-2", "talk-3", *two]) == 0
    assert main(["sessions", "renew", "talk-3", "--ttl-s", "50", *two]) == 0
    capsys.readouterr()
    assert main(["sessions", "show", "talk-3", "--json", *two]) == 0
    assert json.loads(capsys.readouterr().out)["ttl_s"] == 50
    assert main(["sessions", "rm", "talk-3", *two]) == 0
    assert main(["sessions", "rm", "talk-3", *two]) == 1
    assert main(["sessions", "what", *two]) == 2
    assert main(["sessions", "show", *two]) == 2
