"""A request can be explained and cancelled by its id, through any front, by its own tenant only."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
from helpers.served import MODEL, serving, wait_until

from millrace.serve.tenancy.keyring import digest_of

pytestmark = pytest.mark.live


def test_request_can_be_explained_and_cancelled(tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    lines = [f'[tenants.{name}]\nkeys = ["sha256:{digest_of(name).hex()}"]' for name in ("mine", "other")]
    keys.write_text("\n".join(lines))
    with serving("--max-running", "1", "--fronts", "2", "--keys-file", str(keys)) as served:
        wait_until(lambda: served.metric("millrace_fronts_up") == 2, "two fronts")

        def ask(method: str, path: str, body: Any = None, *, who: str = "mine", name: str = "x") -> Any:
            return served.request(method, path, body, {"Authorization": f"Bearer {who}", "X-Request-Id": name})

        def complete(name: str, **fields: Any) -> Any:
            body = {"model": MODEL, "temperature": 0, "ignore_eos": True, "max_tokens": 4, **fields}
            return ask("POST", "/v1/completions", body, name=name)

        words = "The river ran past the old mill and the wheel turned in it all day long while the miller slept "
        complete("first", prompt=words + "in the shade of a tree, as millers do when the water works for them.")
        results: dict[str, Any] = {}
        blocker = threading.Thread(
            target=lambda: results.update(blocker=complete("blocker", prompt="Once", max_tokens=3000))
        )
        blocker.start()
        wait_until(lambda: ask("GET", "/v1/requests/blocker/explain")[0] == 200, "it is known")
        later = threading.Thread(
            target=lambda: results.update(later=complete("later", prompt=words + "by the fire, which is warmer."))
        )
        later.start()
        wait_until(lambda: ask("GET", "/v1/requests/later/explain")[0] == 200, "it is known")
        waiting = ask("GET", "/v1/requests/later/explain")[1]
        assert waiting["state"] == "waiting"
        for _ in range(6):  # whichever front answers
            listed = ask("GET", "/v1/requests")[1]["data"]
            assert [one["request_id"] for one in listed] == ["blocker", "later"]
            assert ask("GET", "/v1/requests/later")[1]["path"] == "/v1/completions"
            assert ask("GET", "/v1/requests", who="other")[1]["data"] == []
        assert ask("GET", "/v1/requests/blocker/explain", who="other")[0] == 404
        assert ask("DELETE", "/v1/requests/blocker", who="other")[0] == 404
        status, cancelled = ask("DELETE", "/v1/requests/blocker")
        assert (status, cancelled["cancelled"]) == (200, True)
        blocker.join(60)
        assert results["blocker"][0] == 499
        assert results["blocker"][1]["error"]["code"] == "request_cancelled"
        later.join(60)
        status, answer = results["later"]
        assert status == 200
        by_answer_id = ask("GET", f"/v1/requests/{answer['id']}/explain")[1]
        explained = ask("GET", "/v1/requests/later/explain")[1]
        assert by_answer_id == explained
        assert (explained["state"], explained["request_id"], explained["priority"]) == ("ended", "later", "standard")
        (sequence,) = explained["sequences"]
        assert sequence["finish_reason"] == "length"
        assert sequence["queue"]["waited_for_s"]["rows"] > 0
        assert "the maximum number of requests was running" in sequence["queue"]["why"]
        assert sequence["cache"]["cached_tokens"] == 16
        assert 16 <= sequence["cache"]["diverged_at_token"] < sequence["prompt_tokens"]
        assert sequence["cache"]["defeated_by"] is None
        # What the front reads is not sent.
        assert {"around", "around_from", "is_reordered"}.isdisjoint(sequence["cache"])
        assert sequence["preemptions"] == {"count": 0, "reasons": []}
        stages = sequence["stages_s"]
        assert list(stages) == ["front", "link", "queue", "prefill", "decode", "total"]
        assert abs(sum(list(stages.values())[:-1]) - stages["total"]) < 1e-3
        outcome = ask("GET", "/v1/requests/later")[1]
        assert (outcome["object"], outcome["state"]) == ("request.outcome", "ended")
        assert (outcome["id"], outcome["request_id"]) == (answer["id"], "later")
        (ended,) = outcome["sequences"]
        assert (ended["finish_reason"], ended["output_tokens"]) == ("length", 4)
        assert ask("GET", "/v1/requests/blocker")[1]["sequences"][0]["finish_reason"] == "cancelled"
        assert ask("GET", "/v1/requests/later", who="other")[0] == 404
        status, missing = ask("GET", "/v1/requests/unknown")
        assert status == 404
        assert "the last 4096 that ended" in missing["error"]["message"]
        assert ask("DELETE", "/v1/requests/later")[1]["cancelled"] is False
        assert ask("DELETE", "/v1/requests/unknown")[0] == 404
