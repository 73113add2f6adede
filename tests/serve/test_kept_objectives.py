"""Objectives about errors at a real front, and their counts after a restart."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from serve.front_under_test import MODEL, Front, running_front, saying
from serve.wire import CHAT, get, post

from millrace.config import Config, replace
from millrace.errors import EngineUnavailable
from millrace.serve.describe.sampler import take_sample

pytestmark = pytest.mark.live
BODY = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}


def counted(front: Front) -> tuple[int, int]:
    front.call(lambda: take_sample(front.state, 0.0))
    [report] = get(front.port, "/v1/stats").json["slos"]
    return report["good"], report["total"]


def test_failed_requests_count_and_are_kept_across_a_restart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = replace(Config(), server__port=0, server__data_dir=str(tmp_path), observe__slos="errors < 10%")
    with running_front(saying("hello"), config=config) as front:
        for _ in range(3):
            assert post(front.port, CHAT, BODY).status == 200
        assert post(front.port, CHAT, {"messages": 5}).status == 400
        assert post(front.port, "/v1/audio/transcriptions", {}).status == 501
        get(front.port, "/nowhere")
        assert counted(front) == (5, 5), "GET does not count, and neither 4xx nor 501 is a failure"

        def fail(*args: object, **options: object) -> None:
            raise EngineUnavailable("The engine is away.")

        with monkeypatch.context() as patch:
            patch.setattr(front.state.admission, "check", fail)
            assert post(front.port, CHAT, BODY).status == 503
        assert counted(front) == (5, 6)
        page = get(front.port, "/metrics").body.decode()
        assert "millrace_failed_requests_total 1.0" in page
        assert "millrace_asked_requests_total 6.0" in page
    assert json.loads((tmp_path / "objectives-0.json").read_text())[MODEL]["errors < 10%"]["total"][-1] == 6
    with running_front(saying("hello"), config=config) as front:
        assert post(front.port, CHAT, BODY).status == 200
        assert counted(front) == (6, 7)


def test_damaged_counts_start_again(tmp_path: Path) -> None:
    (tmp_path / "objectives-0.json").write_text('{"x": ')
    config = replace(Config(), server__port=0, server__data_dir=str(tmp_path), observe__slos="errors < 10%")
    with running_front(saying("hello"), config=config) as front:
        post(front.port, CHAT, BODY)
        assert counted(front) == (1, 1)
