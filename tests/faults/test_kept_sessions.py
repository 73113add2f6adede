"""Sessions outlive their engine: the front keeps what was said, and the next turn computes it again."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from helpers.served import Served, serving, wait_until
from helpers.tiny_server import tiny_options

pytestmark = pytest.mark.live


def say(served: Served, session: str) -> int:
    body = {"messages": [{"role": "user", "content": "Tell me more. " * 8}], "max_tokens": 4}
    return served.request("POST", f"/v1/sessions/{session}/turns", body)[0]


def test_a_session_outlives_its_engine(tmp_path: Path) -> None:
    with serving(*tiny_options(tmp_path)) as served:
        session = str(served.request("POST", "/v1/sessions", {"system": "Remember. " * 20})[1]["id"])

        def seen() -> dict[str, Any]:
            return served.request("GET", f"/v1/sessions/{session}")[1]

        assert say(served, session) == 200
        assert seen()["kv"]["tokens"] > 0
        os.kill(served.child("millrace.supervise.engine_child"), signal.SIGKILL)
        wait_until(lambda: seen()["kv"] is None, "what it kept is gone")
        wait_until(lambda: say(served, session) == 200, "the next engine serves")
        shown = seen()
        assert shown["turns"] == 2
        assert shown["last_turn"]["cached_tokens"] == 0
        assert shown["last_turn"]["recomputed_tokens"] > 0
        assert shown["kv"]["tokens"] > 0
