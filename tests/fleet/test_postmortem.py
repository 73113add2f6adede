from __future__ import annotations

import json
import os
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from millrace.cli import main
from millrace.fleet.postmortem import collect, outages, report
from millrace.fleet.records import read_records

BEGAN = datetime(2026, 11, 18, 14, 0, tzinfo=UTC).timestamp()


def at(seconds: float) -> float:
    return BEGAN + seconds


def write_lines(path: Path, records: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records) + '{"time": 1, "cut off')


def local_clock(seconds: float) -> str:
    return datetime.fromtimestamp(at(seconds)).strftime("%H:%M:%S.000")


@pytest.fixture
def incident(tmp_path: Path) -> Path:
    """r0 is killed at 10 s and back at 14 s; r1 is restarted on purpose; a stream moves; one request fails."""

    def event(seconds: float, member: str, what: str, **facts: Any) -> dict[str, Any]:
        return {"time": at(seconds), "member": member, "event": what, **facts}

    write_lines(
        tmp_path / "events.jsonl",
        [
            event(0, "r0", "ready"),
            event(10, "r0", "ended", code=-9),
            event(10.1, "r0", "waiting", why="signal 9 ended it", wait_s=1.0),
            event(14, "r0", "ready"),
            event(20, "r1", "draining"),
            event(21, "r1", "ended", code=0),
            event(23.5, "r1", "ready"),
            event(30, "r2", "ended", code=3),
            event(30.1, "r2", "waiting", why="it ended with code 3"),
        ],
    )
    choice = {"replica": "r1", "reason": "It has the prefix."}
    first = {
        "at": at(5),
        "candidates": [],
        "choice": {**choice, "replica": "r0"},
        "asked": {"id": "q1"},
        "cause": "new",
    }
    moved = {"at": at(10.2), "candidates": [], "choice": choice, "asked": {"id": "q1"}, "cause": "resume"}
    outcome = {"id": "q1", "replica": "r1", "ended": "ok", "first_byte_s": 0.1, "total_s": 9.0}
    write_lines(tmp_path / "decisions.jsonl", [first, moved, outcome])
    times = [datetime.fromtimestamp(at(seconds), UTC).isoformat() for seconds in (12, 13)]
    audit = {"path": "/v1/chat/completions", "tenant": "acme", "seconds": 1.5}
    write_lines(
        tmp_path / "audit.jsonl",
        [
            {**audit, "time": times[0], "request_id": "q1", "status": 200, "error": None},
            {**audit, "time": times[1], "request_id": "q2", "status": 503, "error": "engine_unavailable"},
        ],
    )
    nanoseconds = [str(int(at(second) * 1e9)) for second in (11, 12)]
    span = {"name": "POST /v1/messages", "startTimeUnixNano": nanoseconds[0], "endTimeUnixNano": nanoseconds[1]}
    spans = {"resourceSpans": [{"scopeSpans": [{"spans": [{**span, "status": {"code": 2}}]}]}]}
    write_lines(tmp_path / "spans.jsonl", [spans])
    log = tmp_path / "r0.log"
    log.write_text(
        f"{local_clock(9)} info | all is well\n{local_clock(9.9)} error engine | the step hangs\nTraceback (…)\n"
    )
    os.utime(log, (at(9.9), at(9.9)))
    return tmp_path


def test_outages_have_their_length_and_reason(incident: Path) -> None:
    found = outages(collect([incident]))
    assert [(one.member, one.why) for one in found] == [
        ("r0", "signal 9 ended it"),
        ("r1", "it was restarted on purpose"),
        ("r2", "it ended with code 3"),
    ]
    assert [None if one.ended is None else round(one.ended - one.began, 3) for one in found] == [4.0, 2.5, None]


def test_the_report_has_every_source_in_the_order_of_time(incident: Path) -> None:
    text = report(collect([incident]))
    assert "- r0 for 4.0 s from 2026-11-18 14:00:10.000 on: signal 9 ended it." in text
    assert "r2 from 2026-11-18 14:00:30.000 on, and was not back" in text
    assert "- 2 ended, 1 of them with an error." in text
    assert "1 streams that moved" in text
    timeline = text.partition("## Timeline")[2]
    found = [
        timeline.index(part)
        for part in (
            "r0 engine: the step hangs",
            "r0: ended (code -9)",
            "request q1: resume to r1: It has the prefix.",
            "span POST /v1/messages took 1.000 s and failed",
            "request q2: /v1/chat/completions answered 503 after 1.500 s, engine_unavailable",
        )
    ]
    assert found == sorted(found)
    assert "all is well" not in timeline
    assert "request q1: new" not in timeline
    assert "all is well" in report(collect([incident]), shows_all=True)


def test_log_lines_before_midnight_are_of_the_day_before(tmp_path: Path) -> None:
    log = tmp_path / "r0.log"
    log.write_text(
        "23:59:58.000 error | late\n00:00:01.500 error | early\n00:00:01.400 info front 1 | almost together\n"
    )
    changed = datetime(2026, 11, 18, 0, 0, 2).timestamp()
    os.utime(log, (changed, changed))
    late, early, other = read_records(log)
    assert (early.time - late.time, round(early.time - other.time, 3)) == (3.5, 0.1)


def test_the_command_writes_a_file_for_a_window(incident: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = incident / "incident.md"
    window = ["--since", "2026-11-18T14:00:09", "--until", "2026-11-18T14:00:15"]
    assert main(["postmortem", str(incident), *window, "--out", str(out)]) == 0
    assert "r0 for 4.0 s" in out.read_text()
    assert "r2" not in out.read_text()
    assert main(["postmortem", str(incident), "--since", "2027-01-01"]) == 2
    assert "Nothing happened" in capsys.readouterr().err
    assert main(["postmortem", str(incident), "--last", "soon"]) == 2
    assert main(["postmortem", str(incident / "none")]) == 1
    assert "does not exist" in capsys.readouterr().err
