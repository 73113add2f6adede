"""A tenant is forgotten: nothing of its blocks, handles and sessions is left, and others keep what they have."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from contract.real_server import RealServer, real_server
from helpers.tiny_server import NAME, tiny_options
from serve.wire import CHAT, Reply, eventually, request

from millrace.cli import main
from millrace.serve.tenancy.keyring import digest_of

pytestmark = pytest.mark.live
FORGET = "/v1/tenants/acme/cache"


def ask(server: RealServer, who: str, method: str, path: str, body: Any = None) -> Reply:
    return request(server.port, method, path, body, headers={"Authorization": f"Bearer key-{who}"})


def cached(server: RealServer, who: str) -> int:
    """Tokens of one prompt, which all tenants send, that were found."""
    body = {"model": NAME, "prompt": [300 + 7 * place % 900 for place in range(160)], "max_tokens": 1}
    usage = ask(server, who, "POST", "/v1/completions", body).json["usage"]
    return int(usage["prompt_tokens_details"]["cached_tokens"])


def test_a_tenant_is_forgotten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tenants = {"acme": "", "other": "", "boss": "operator = true"}
    hashed = {name: digest_of(f"key-{name}").hex() for name in tenants}
    lines = [f'[tenants.{name}]\nkeys = ["sha256:{hashed[name]}"]\n{more}\n' for name, more in tenants.items()]
    (tmp_path / "keys.toml").write_text("".join(lines))
    (tmp_path / "key").write_text("k" * 32)
    disk = ("--kv-host-gib", "0.01", "--kv-disk", str(tmp_path / "kv"), "--kv-disk-gib", "0.05")
    options = (*tiny_options(tmp_path), *disk, "--kv-disk-key", str(tmp_path / "key"))
    options += ("--keys-file", str(tmp_path / "keys.toml"))
    with real_server(*options) as server:
        assert [cached(server, who) for who in ("acme", "acme", "other", "other")] == [0, 144, 0, 144]
        session = ask(server, "acme", "POST", "/v1/sessions", {}).json["id"]
        turn = {"messages": [{"role": "user", "content": "x" * 200}], "max_tokens": 4}
        assert ask(server, "acme", "POST", f"/v1/sessions/{session}/turns", turn).status == 200
        ask(server, "acme", "POST", "/v1/cache", {"prompt": [5] * 64, "name": "five"})

        def is_written() -> bool:
            stats = ask(server, "boss", "GET", "/v1/stats").json
            return bool(stats["now"]["kv_blocks"]["disk"]["used"] >= 20)

        eventually(is_written)
        assert len([*(tmp_path / "kv").glob("keys-*/*")]) == 2
        assert ask(server, "acme", "DELETE", FORGET).status == 403
        found = ask(server, "boss", "DELETE", FORGET)
        assert found.status == 200, found.json
        assert (found.json["sessions"], found.json["handles"], found.json["shares_prefixes"]) == (1, 2, False)
        assert all(found.json["blocks"][location] > 0 for location in ("device", "host", "disk"))
        assert len([*(tmp_path / "kv").glob("keys-*/*")]) == 1
        assert ask(server, "acme", "GET", f"/v1/sessions/{session}").status == 404
        assert ask(server, "acme", "GET", "/v1/cache").json["data"] == []
        assert cached(server, "other") == 144
        assert cached(server, "acme") == 0
        assert ask(server, "acme", "POST", CHAT, {"model": NAME, **turn}).status == 200
    with real_server(*options) as server:
        assert cached(server, "other") == 144
        line = 'millrace_tenant_prefix_tokens_total{tenant="other",tier="disk"} 144.0'
        eventually(lambda: line in ask(server, "boss", "GET", "/metrics").body.decode())  # The engine reports at times.
        url = ["--url", server.url, "--api-key", "key-boss"]
        assert main(["cache", "forget", "acme", *url, "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["blocks"]["disk"] > 0, "what it sent after it was forgotten"
        assert cached(server, "acme") == 0
        assert main(["cache", "forget", "acme", *url]) == 0
        assert "acme is forgotten: 0 requests, 0 sessions, 0 handles" in capsys.readouterr().out
