"""/v1/load: what a gateway asks a replica for before it chooses one."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from serve.front_under_test import MODEL, Front, endless, running_front
from serve.wire import CHAT, connected, eventually, get, raw_post

from millrace.link.engine_stats import EngineStats
from millrace.version import __version__

pytestmark = pytest.mark.live


def report(front: Front, **changed: Any) -> None:
    stats: EngineStats = msgspec.structs.replace(front.engine.stats(), **changed)
    front.call(lambda: setattr(front.state.client, "stats", stats))


def test_load_is_what_the_engine_last_reported() -> None:
    with running_front() as front:
        report(
            front,
            running=3,
            waiting=2,
            waiting_tokens=(5, 20, 100),
            running_prefill_tokens=(0, 7, 0),
            mean_step_s=0.0125,
            tokens_per_s=812.5,
        )
        load = get(front.port, "/v1/load").json
        assert (load["model"], load["status"], load["draining"], load["version"]) == (
            *(MODEL, "loaded", False),
            __version__,
        )
        assert (load["running"], load["waiting"], load["waiting_tokens"]) == (3, 2, 132)
        assert (load["kv_used"], load["step_ms"], load["tokens_per_s"]) == (0.1, 12.5, 812.5), "cached blocks are free"
        assert load["block_tokens"] == 16
        [listed] = load["models"]
        assert listed == {name: load[name] for name in listed}
        assert get(front.port, "/v1/load?model=other").status == 404
        assert get(front.port, "/v1/load?mode=1").json["error"]["param"] == "mode"


def test_a_model_that_is_not_loaded_has_no_load_but_a_status() -> None:
    with running_front(is_ready=False) as front:
        load = get(front.port, "/v1/load").json
        assert (load["status"], load["running"], load["block_tokens"]) == ("loading", 0, 0)


def test_a_server_that_drains_says_so_while_its_last_stream_runs() -> None:
    with running_front(endless, step_s=0.005) as front, connected(front.port) as sock:
        body = {"model": MODEL, "stream": True, "max_tokens": 4000, "messages": [{"role": "user", "content": "Hi"}]}
        sock.sendall(raw_post(CHAT, body))
        assert sock.recv(100)
        front.begin_stop()
        eventually(lambda: get(front.port, "/v1/load").json["draining"])
