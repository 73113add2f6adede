"""API keys, tenants, quotas, origins, deadlines and the audit log."""

from __future__ import annotations

import json
import random
import ssl
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from serve.front_under_test import MODEL, Front, endless, running_front, saying
from serve.wire import CHAT, COMPLETIONS, eventually, get, post, request, stream

from millrace.cli import main
from millrace.config import Config, replace
from millrace.errors import ConfigError
from millrace.link.engine_stats import TenantFigures
from millrace.observe.audit import AuditLog
from millrace.serve.app import tls_context
from millrace.serve.created_models import CreatedModel, CreatedModels
from millrace.serve.tenancy import keyring
from millrace.serve.tenancy.keyring import Keyring, digest_of
from millrace.serve.tenancy.quotas import Quotas

pytestmark = pytest.mark.live


def body(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "prompt": "hi", "max_tokens": 4, **fields}


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def tenants_file(path: Path, **tenants: str) -> Path:
    """Each tenant has the key `key-<name>` and the given lines."""
    lines = []
    for name, more in tenants.items():
        lines += [f"[tenants.{name}]", f'keys = ["sha256:{digest_of(f"key-{name}").hex()}"]', more]
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


@contextmanager
def guarded(tmp_path: Path, script: Any = None, **tenants: str) -> Iterator[Front]:
    with running_front(script or saying("ok"), step_s=0.001) as front:
        file = tenants_file(tmp_path / "keys.toml", **tenants)
        front.state.keyring = Keyring(file)
        yield front


def test_a_known_key_is_required(tmp_path: Path) -> None:
    with guarded(tmp_path, acme="") as front:
        for headers, code in (
            ({}, "missing_api_key"),
            ({"Authorization": "Basic abc"}, "missing_api_key"),
            (bearer("key-acmf"), "invalid_api_key"),
            (bearer(""), "missing_api_key"),
            ({"x-api-key": "nonsense"}, "invalid_api_key"),
        ):
            reply = post(front.port, COMPLETIONS, body(), headers)
            assert reply.status == 401
            assert reply.error["code"] == code
            assert "key-acme" not in reply.body.decode()
        assert post(front.port, COMPLETIONS, body(), bearer("key-acme")).status == 200
        assert post(front.port, COMPLETIONS, body(), {"x-api-key": "key-acme"}).status == 200
        for path in ("/health", "/ready", "/metrics", "/docs", "/openapi.json"):
            assert get(front.port, path).status == 200, path
        assert get(front.port, "/v1/models").status == 401
        assert get(front.port, "/v1/nowhere").status == 401


def test_the_keys_file_is_reloaded_and_a_broken_one_is_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keyring, "RELOAD_CHECK_S", 0.0)
    with guarded(tmp_path, acme="") as front:
        assert post(front.port, COMPLETIONS, body(), bearer("key-new")).status == 401
        tenants_file(tmp_path / "keys.toml", new="")
        assert post(front.port, COMPLETIONS, body(), bearer("key-new")).status == 200
        assert post(front.port, COMPLETIONS, body(), bearer("key-acme")).status == 401
        (tmp_path / "keys.toml").write_text("[tenants.new\n")
        assert post(front.port, COMPLETIONS, body(), bearer("key-new")).status == 200
        (tmp_path / "keys.toml").unlink()
        assert post(front.port, COMPLETIONS, body(), bearer("key-new")).status == 200


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[tenants.a]\nkeys = ['plain-text-key']", "sha256:"),
        ("[tenants.a]\nweight = 0", "weight"),
        ("[tenants.a]\nmax_concurrent = -1", "max_concurrent"),
        ("[tenants.a]\ntokens_per_minut = 5", "tokens_per_minut"),
        ("[models.a]\nweight = 0", "the model 'a' has weight 0"),
        ("[tenants.a]\nmost_urgent = 'now'", "most_urgent"),
        ("tenants = 3", "tenants"),
    ],
)
def test_a_wrong_keys_file_is_refused_at_start(tmp_path: Path, text: str, says: str) -> None:
    file = tmp_path / "keys.toml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=says):
        Keyring(file)


def test_weights_are_those_of_the_holders_of_shares(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "keys.toml"
    file.write_text('[tenants.a]\nweight = 2\n[models."m:pirate"]\nweight = 3\n[models.pirate]\nmax_concurrent = 9')
    names = ("pirate", "m:pirate")
    tenant = Keyring(file).named("a")
    assert Keyring(file).weight_of(tenant, names) == 2
    assert not caplog.records
    assert Keyring(file, "tenant").weight_of(tenant, names) == 2
    assert "weights of models, which count with --share-by adapter only" in caplog.text
    keyring = Keyring(file, "adapter")
    assert (keyring.weight_of(tenant, names), keyring.weight_of(tenant, ("m",))) == (3, 1)
    assert "weights of tenants, which do not count" in caplog.text


def test_concurrent_requests_are_limited_per_tenant(tmp_path: Path) -> None:
    with guarded(tmp_path, endless, small="max_concurrent = 2", other="") as front:
        long = body(max_tokens=20)
        front.call(front.engine.pause)
        threads = [
            threading.Thread(target=post, args=(front.port, COMPLETIONS, long, bearer("key-small"))) for _ in range(2)
        ]
        for thread in threads:
            thread.start()
        eventually(lambda: len(front.engine.rows) == 2)
        reply = post(front.port, COMPLETIONS, body(), bearer("key-small"))
        assert reply.status == 429
        assert reply.error["code"] == "quota_exceeded"
        assert int(reply.headers["retry-after"]) >= 1
        threads.append(threading.Thread(target=post, args=(front.port, COMPLETIONS, long, bearer("key-other"))))
        threads[-1].start()
        eventually(lambda: len(front.engine.rows) == 3)
        front.call(front.engine.resume)
        for thread in threads:
            thread.join(60)
        assert post(front.port, COMPLETIONS, body(), bearer("key-small")).status == 200


def test_tokens_per_minute_count_used_tokens(tmp_path: Path) -> None:
    with guarded(tmp_path, saying("abc"), small="tokens_per_minute = 50") as front:
        key = bearer("key-small")
        # Each uses 2 + 4 tokens, whatever its limit is.
        for _ in range(5):
            assert post(front.port, COMPLETIONS, body(max_tokens=18), key).status == 200
        reply = post(front.port, COMPLETIONS, body(max_tokens=19), key)
        assert reply.status == 429
        assert 1 <= int(reply.headers["retry-after"]) <= 60
        assert post(front.port, COMPLETIONS, body(max_tokens=10), key).status == 200
        hopeless = post(front.port, COMPLETIONS, body(max_tokens=60), key)
        assert (hopeless.status, hopeless.error["code"]) == (400, "quota_exceeded")


def test_a_refused_request_releases_its_reservation(tmp_path: Path) -> None:
    with guarded(tmp_path, small="max_concurrent = 1\ntokens_per_minute = 10000") as front:
        for _ in range(3):
            assert post(front.port, COMPLETIONS, body(max_tokens=5000), bearer("key-small")).status == 400
        assert front.state.quotas.usage("small").num_open == 0
        assert front.state.quotas.usage("small").spent(int(time.time())) == 0


def test_quotas_are_shared_between_fronts(tmp_path: Path) -> None:
    one, two = (Quotas(str(tmp_path), 2, index) for index in range(2))
    one.usage("a").open(1)
    two.usage("a").open(1)
    two.usage("a").spend(7, 100)
    assert one.usage("a").num_open == 2
    assert one.usage("a").spent(150) == 7
    assert one.usage("a").spent(160) == 0
    assert one.usage("b").num_open == 0
    again = Quotas(str(tmp_path), 2, 1)  # The second front was restarted.
    assert again.usage("a").num_open == one.usage("a").num_open == 1


def test_when_tokens_become_free_again() -> None:
    usage = Quotas().usage("a")
    usage.spend(30, 100)
    usage.spend(30, 130)
    assert usage.seconds_until_free(40, 100, 140) == 1
    assert usage.seconds_until_free(50, 100, 140) == 20
    assert usage.seconds_until_free(90, 100, 140) == 50


def test_counters_of_one_process_and_of_several_say_the_same(tmp_path: Path) -> None:
    draw, own, shared = random.Random(1), Quotas().usage("a"), Quotas(str(tmp_path)).usage("a")
    now, held = 1000, list[tuple[int, int]]()
    for _ in range(3000):
        now += draw.choice((0, 0, 0, 0, 1, 2, 70))
        tokens = draw.randrange(1, 50)
        if held and draw.random() < 0.4:
            refund, second = held.pop(draw.randrange(len(held)))
            for usage in (own, shared):
                usage.open(-1)
                usage.refund(refund, second)
        else:
            for usage in (own, shared):
                usage.open(1)
                usage.spend(tokens, now)
            held.append((draw.randrange(tokens + 1), now))
        assert (own.num_open, own.spent(now)) == (shared.num_open, shared.spent(now))
        wanted = draw.randrange(1, 40)
        if own.spent(now) + wanted > 100:
            assert own.seconds_until_free(wanted, 100, now) == shared.seconds_until_free(wanted, 100, now)


def test_classes_and_weights_reach_the_engine(tmp_path: Path) -> None:
    with guarded(tmp_path, plain='most_urgent = "standard"\nweight = 3.5\nprivate_cache = true') as front:
        key = bearer("key-plain")
        refused = post(front.port, COMPLETIONS, body(priority="interactive"), key)
        assert (refused.status, refused.error["param"]) == (403, "priority")
        assert post(front.port, COMPLETIONS, body(priority="batch"), {**key, "X-Request-Id": "mine"}).status == 200
        sent = front.engine.received[-1]
        assert (sent.tenant, sent.weight, sent.priority) == ("plain", 3.5, 2)
        assert sent.names[0] == "mine"
        assert sent.names[1].startswith("cmpl-")
        assert sent.cache_salt == "\0plain\0"


def test_a_request_that_can_never_fit_a_quota_is_told_no_limit_that_it_did_not_send(tmp_path: Path) -> None:
    with guarded(tmp_path, small="tokens_per_minute = 10") as front:
        key = bearer("key-small")
        assert post(front.port, "/v1/embeddings", {"model": MODEL, "input": "x" * 10}, key).status == 200
        error = post(front.port, "/v1/embeddings", {"model": MODEL, "input": "x" * 11}, key).error
        assert (error["code"], error["param"]) == ("quota_exceeded", None)
        assert "may use 11 tokens" in error["message"]
        assert "max_tokens" not in error["message"]


def test_a_request_without_a_class_gets_one_that_its_tenant_may_have(tmp_path: Path) -> None:
    with guarded(tmp_path, slow='most_urgent = "batch"', plain='most_urgent = "standard"', fast="") as front:
        chat = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
        plain = {
            COMPLETIONS: body(),
            CHAT: {**chat, "service_tier": "auto"},
            "/v1/embeddings": {"model": MODEL, "input": "hi"},
            "/v1/responses": {"model": MODEL, "input": "hi"},
            "/v1/messages": chat,
            "/api/chat": {**chat, "max_tokens": None, "stream": False},
            "/api/embed": {"model": MODEL, "input": "hi"},
        }
        for name, number in (("slow", 2), ("plain", 1), ("fast", 1)):
            for path, sent in plain.items():
                reply = post(front.port, path, sent, bearer(f"key-{name}"))
                assert (reply.status, front.engine.received[-1].priority) == (200, number), (path, reply.body)
        for sent in (body(priority="standard"), body(priority=0)):
            assert post(front.port, COMPLETIONS, sent, bearer("key-slow")).status == 403
        assert post(front.port, CHAT, {**chat, "service_tier": "priority"}, bearer("key-slow")).status == 403


def test_a_background_response_has_no_more_urgent_class_than_its_tenant(tmp_path: Path) -> None:
    with guarded(tmp_path, slow='most_urgent = "batch"') as front:
        key, sent = bearer("key-slow"), {"model": MODEL, "input": "hi", "background": True}
        ends = []
        for fields in ({}, {"priority": "interactive"}):
            made = post(front.port, "/v1/responses", {**sent, **fields}, key).json

            def status(name: str = made["id"]) -> str:
                return str(request(front.port, "GET", f"/v1/responses/{name}", headers=key).json["status"])

            eventually(lambda read=status: read() in ("completed", "failed"), 60)
            ends.append(status())
        assert ends == ["completed", "failed"]
        assert {one.priority for one in front.engine.received} == {2}


def test_a_deadline_in_a_header() -> None:
    with running_front(endless, step_s=0.01) as front:
        reply = post(front.port, COMPLETIONS, body(max_tokens=3000), {"X-Request-Timeout": "0.2"})
        assert (reply.status, reply.error["code"]) == (504, "deadline_exceeded")
        reply = post(front.port, COMPLETIONS, body(max_tokens=3000, timeout=0.2), {"X-Request-Timeout": "100"})
        assert reply.status == 504
        for wrong in ("soon", "-1", "nan", "inf", ""):
            reply = post(front.port, COMPLETIONS, body(), {"X-Request-Timeout": wrong})
            assert (reply.status, reply.error["param"]) == (400, "X-Request-Timeout")


# ── origins ───────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_only_allowed_origins_may_call() -> None:
    config = replace(Config(), server__port=0, server__cors_origins="https://a.example, https://b.example")
    with running_front(saying("ok"), config=config) as front:
        ask = {"Origin": "https://a.example", "Access-Control-Request-Method": "POST"}
        asked = request(front.port, "OPTIONS", CHAT, headers={**ask, "Access-Control-Request-Headers": "authorization"})
        assert asked.status == 204
        assert asked.headers["access-control-allow-origin"] == "https://a.example"
        assert "POST" in asked.headers["access-control-allow-methods"]
        assert asked.headers["access-control-allow-headers"] == "authorization"
        origin = {"Origin": "https://b.example"}
        for reply in (
            post(front.port, COMPLETIONS, body(), origin),
            post(front.port, COMPLETIONS, body(stream=True), origin),
            post(front.port, COMPLETIONS, body(nonsense=1), origin),
        ):
            assert reply.headers["access-control-allow-origin"] == "https://b.example"
            assert reply.headers["vary"] == "Origin"
        stranger = post(front.port, COMPLETIONS, body(), {"Origin": "https://evil.example"})
        assert "access-control-allow-origin" not in stranger.headers
    with running_front(saying("ok")) as front:
        refused = request(front.port, "OPTIONS", COMPLETIONS, headers=ask)
        assert refused.status == 405
        assert refused.headers["allow"] == "POST"
        assert "--cors-origins https://a.example" in refused.error["message"]
        assert "--cors-origins" not in request(front.port, "OPTIONS", CHAT).error["message"]


# ── the audit log ─────────────────────────────────────────────────────────────────────────────────────────────────────
def test_the_audit_log_has_tenants_and_counts_but_no_text(tmp_path: Path) -> None:
    file = tmp_path / "audit.jsonl"
    with guarded(tmp_path, saying("SECRET ANSWER"), acme="") as front:
        front.state.audit = AuditLog(str(file))
        key = {**bearer("key-acme"), "X-Request-Id": "r-1"}
        post(front.port, COMPLETIONS, body(prompt="PRIVATE WORDS", max_tokens=50), key)
        stream(front.port, COMPLETIONS, body(prompt="PRIVATE WORDS", max_tokens=5), headers=key)
        post(front.port, COMPLETIONS, body(temperature="PRIVATE WORDS"), key)
        post(front.port, COMPLETIONS, body(), bearer("key-wrong"))
        get(front.port, "/health")
    text = file.read_text()
    lines = [json.loads(line) for line in text.splitlines()]
    assert [line["status"] for line in lines] == [200, 200, 400, 401]
    assert [line["finish"] for line in lines] == ["stop", "length", None, None]
    assert [line["tenant"] for line in lines] == ["acme", "acme", "acme", ""]
    assert lines[0]["request_id"] == "r-1"
    assert lines[0]["prompt_tokens"] == 13
    assert lines[0]["output_tokens"] == 14
    assert lines[3]["error"] == "invalid_api_key"
    for secret in ("PRIVATE", "SECRET", "key-acme", "key-wrong"):
        assert secret not in text
    assert file.stat().st_mode & 0o077 == 0


def test_the_audit_log_follows_a_rotation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("millrace.observe.audit.CHECK_INTERVAL_S", 0.0)
    file = tmp_path / "audit.jsonl"
    log = AuditLog(str(file))
    log.write({"n": 1})
    file.rename(tmp_path / "audit.1")
    log.write({"n": 2})
    log.close()
    assert json.loads(file.read_text()) == {"n": 2}
    with pytest.raises(ConfigError, match="cannot be opened"):
        AuditLog(str(tmp_path / "no" / "such" / "dir"))


# ── the command ───────────────────────────────────────────────────────────────────────────────────────────────────────
def test_keys_are_created_listed_and_revoked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "keys.toml"
    assert main(["keys", "add", str(file), "--tenant", "acme", "--tokens-per-minute", "500"]) == 0
    key = capsys.readouterr().out.split()[0]
    assert key not in file.read_text()
    assert file.stat().st_mode & 0o077 == 0
    assert Keyring(file).tenant_of(key).tokens_per_minute == 500
    assert main(["keys", "add", str(file), "--tenant", "acme", "--weight", "2"]) == 0
    second = capsys.readouterr().out.split()[0]
    assert Keyring(file).tenant_of(key) == Keyring(file).tenant_of(second)
    assert Keyring(file).tenant_of(second).weight == 2
    assert main(["keys", "list", str(file)]) == 0
    assert "acme" in capsys.readouterr().out
    assert main(["keys", "remove", str(file), "--hash", digest_of(key).hex()[:10]]) == 0
    assert Keyring(file).tenant_of(second).name == "acme"
    with pytest.raises(Exception, match="Unknown API key"):
        Keyring(file).tenant_of(key)


# ── TLS ───────────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_https_serves_answers_and_streams(tmp_path: Path) -> None:
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    subject = ["-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run([*command, *subject, "-keyout", key, "-out", cert], check=True, capture_output=True)
    config = replace(Config(), server__port=0, server__tls_cert=str(cert), server__tls_key=str(key))
    with running_front(saying("over TLS"), config=config) as front:
        context = ssl.create_default_context(cafile=str(cert))
        with httpx.Client(base_url=f"https://127.0.0.1:{front.port}", verify=context) as client:
            assert client.get("/health").json() == {"status": "ok"}
            answer = client.post(COMPLETIONS, json=body(max_tokens=20)).json()
            assert answer["choices"][0]["text"] == "over TLS"
            streamed = client.post(COMPLETIONS, json=body(max_tokens=20, stream=True)).text
            assert streamed.endswith("data: [DONE]\n\n")
    with pytest.raises(ConfigError, match="tls_key"):
        tls_context(replace(Config(), server__tls_cert=str(cert)))
    with pytest.raises(ConfigError, match="Cannot load the certificate"):
        tls_context(replace(Config(), server__tls_cert=str(key), server__tls_key=str(cert)))


def test_figures_of_other_tenants_need_an_operators_key(tmp_path: Path) -> None:
    with guarded(tmp_path, acme="", other="", boss="operator = true") as front:
        shares = tuple(TenantFigures(name) for name in ("acme", "other"))
        stats = front.call(front.engine.stats)
        front.state.client.stats = msgspec.structs.replace(stats, tenants=shares)
        for headers in ({}, bearer("key-acme")):
            page = get(front.port, "/metrics", headers=headers).body.decode()
            assert "millrace_engine_steps_total" in page
            assert 'tenant="' not in page
        assert 'tenant="other"' in get(front.port, "/metrics", headers=bearer("key-boss")).body.decode()
        assert get(front.port, "/metrics", headers=bearer("wrong")).status == 401
        assert get(front.port, "/health", headers=bearer("wrong")).status == 200
        assert get(front.port, "/v1/steps", headers=bearer("key-acme")).status == 403
        assert get(front.port, "/v1/steps", headers=bearer("key-boss")).status == 200
        assert get(front.port, "/v1/cost?price=2", headers=bearer("key-acme")).status == 403
        assert get(front.port, "/v1/cost?price=2", headers=bearer("key-boss")).status == 200


def test_keys_for_some_models_only(tmp_path: Path) -> None:
    with guarded(tmp_path, acme=f'models = ["{MODEL}:pirate", "small*"]', boss="operator = true") as front:
        known = front.state.client.adapters.known
        front.call(lambda: known.on_new_engine(("legal", "pirate")))

        def status(key: str, model: str, path: str = COMPLETIONS) -> int:
            return post(front.port, path, {**body(), "model": model}, bearer(key)).status

        assert (status("key-acme", f"{MODEL}:pirate"), status("key-acme", "pirate")) == (200, 200)
        refused = post(front.port, COMPLETIONS, {**body(), "model": f"{MODEL}:legal"}, bearer("key-acme"))
        assert refused.status == 403
        assert f"may not use the model '{MODEL}:legal'" in refused.error["message"]
        assert (status("key-acme", MODEL), status("key-boss", MODEL)) == (403, 200)
        listed = request(front.port, "GET", "/v1/models", None, bearer("key-acme")).json["data"]
        assert [one["id"] for one in listed] == [f"{MODEL}:pirate"]


def test_keys_may_name_a_model_by_any_of_its_names(tmp_path: Path) -> None:
    tenants = {"alias": 'models = ["short"]', "adapter": 'models = ["short:pirate"]', "made": 'models = ["mario"]'}
    with guarded(tmp_path, **tenants, nobody='models = ["other"]') as front:
        models, (model,) = front.state.models, front.state.models
        model.aliases = ("short",)
        models.by_name["short"] = model
        models.created = CreatedModels(tmp_path)
        models.created.put(CreatedModel(name="mario", model=MODEL, system="You jump."))
        front.call(lambda: model.client.adapters.known.on_new_engine(("legal", "pirate")))

        def used(key: str) -> set[str]:
            """The models that the key may use, by asking for them and by the list of models."""
            asked, headers = (
                {MODEL, "short", "mario", f"{MODEL}:pirate", "short:pirate", "pirate", "legal"},
                bearer(key),
            )
            ways = [
                lambda name: post(front.port, COMPLETIONS, {**body(), "model": name}, headers),
                lambda name: get(front.port, f"/v1/models/{name}", headers=headers),
                lambda name: post(front.port, "/api/show", {"model": name}, headers),
            ]
            found = [{name for name in asked if way(name).status == 200} for way in ways]
            assert found[0] == found[1] == found[2]
            listed = {one["id"] for one in request(front.port, "GET", "/v1/models", None, headers).json["data"]}
            assert listed == found[0] - {"short:pirate", "pirate"}, "adapters are listed by one name"
            return found[0]

        assert used("key-alias") == {MODEL, "short", "mario"}
        assert used("key-adapter") == {f"{MODEL}:pirate", "short:pirate", "pirate"}
        assert used("key-made") == {"mario"}
        assert used("key-nobody") == set()


@pytest.mark.parametrize("name", ["pirate", "short:pirate"])
def test_limits_may_name_an_adapter_by_any_of_its_names(tmp_path: Path, name: str) -> None:
    with guarded(tmp_path, acme=f'[models."{name}"]\ntokens_per_minute = 1') as front:
        front.state.models.by_name["short"] = model = next(iter(front.state.models))
        model.aliases = ("short",)
        front.call(lambda: model.client.adapters.known.on_new_engine(("pirate",)))
        assert post(front.port, COMPLETIONS, {**body(), "model": f"{MODEL}:pirate"}, bearer("key-acme")).status == 400
        assert post(front.port, COMPLETIONS, body(), bearer("key-acme")).status == 200


def test_limits_of_an_adapter_hold_for_all_tenants_together(tmp_path: Path) -> None:
    limits = f'[models."{MODEL}:pirate"]\ntokens_per_minute = 30'
    with guarded(tmp_path, acme="", other=limits) as front:
        known = front.state.client.adapters.known
        front.call(lambda: known.on_new_engine(("legal", "pirate")))

        def ask(key: str, name: str) -> Any:
            return post(front.port, COMPLETIONS, {**body(max_tokens=20), "model": f"{MODEL}:{name}"}, bearer(key))

        for _ in range(5):  # Each uses 5 tokens: 2 of the prompt and "ok" with its end.
            assert ask("key-acme", "legal").status == 200
        assert ask("key-acme", "pirate").status == 200
        assert ask("key-other", "pirate").status == 200
        refused = ask("key-other", "pirate")
        assert refused.status == 429
        assert f"The model '{MODEL}:pirate' has used" in refused.error["message"]
        assert ask("key-other", "legal").status == 200, "nothing of the refused request stays reserved"


def test_keys_are_added_beside_limits_of_models(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "keys.toml"
    file.write_text('[models."m:a"]\nmax_concurrent = 3\n')
    assert main(["keys", "add", str(file), "--tenant", "acme", "--models", "m:a,m:b*"]) == 0
    found = keyring.read_keys(file)
    assert found.tenants["acme"].models == ("m:a", "m:b*")
    assert found.models["m:a"].max_concurrent == 3
    capsys.readouterr()
    main(["keys", "list", str(file)])
    assert "models ('m:a', 'm:b*')" in capsys.readouterr().out
