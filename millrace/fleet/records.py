"""What a fleet leaves behind, as entries with a time: events, logs, audit logs, decision logs and traces.

A file's kind is seen from its lines, so files may have any name. Lines that a kill cut off are left out.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any, Literal

Level = Literal["info", "notable", "bad"]

_LOG_LINE = re.compile(r"^(\d\d):(\d\d):(\d\d)\.(\d{3}) (debug|info|warning|error|critical)((?: [^|]*)?) \| (.*)$")
_LEVELS: dict[str, Level] = {"warning": "notable", "error": "bad", "critical": "bad"}
_BAD_EVENTS = frozenset({"killed", "waiting", "the file is wrong"})
_STATUS_ERROR = 2
_NS_PER_S = 1e9


@dataclass(frozen=True, slots=True)
class Entry:
    time: float
    """Unix time."""
    source: str
    what: str
    level: Level = "info"
    kind: str = ""
    """event, log, request, decision, outcome or span."""
    member: str = ""
    """The member of the fleet that it is about."""
    facts: tuple[tuple[str, Any], ...] = ()

    def fact(self, name: str) -> Any:
        return dict(self.facts).get(name)


def read_records(path: Path) -> list[Entry]:
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    records = [found for line in lines if line.startswith("{") and isinstance(found := _json(line), dict)]
    if records:
        return [entry for record in records for entry in _entries(path.stem, record)]
    return list(_log_entries(path, lines))


def _json(line: str) -> Any:
    try:
        return json.loads(line)
    except ValueError:
        return None


# ── lines of JSON ─────────────────────────────────────────────────────────────────────────────────────────────────────
def _entries(source: str, record: dict[str, Any]) -> Iterable[Entry]:
    for field, read in _KINDS.items():
        if field in record:
            try:
                return list(read(source, record))
            except (KeyError, TypeError, ValueError):
                return ()
    return ()


def _event(source: str, record: dict[str, Any]) -> Iterator[Entry]:
    member, event = str(record["member"]), str(record["event"])
    facts = {name: value for name, value in record.items() if name not in ("time", "member", "event")}
    level: Level = "bad" if event in _BAD_EVENTS else "notable"
    if event == "ended" and not facts.get("code"):
        level = "info"
    said = f"{member}: {event}" + (f" ({_listed(facts)})" if facts else "")
    yield Entry(float(record["time"]), source, said, level, "event", member, (("event", event), *facts.items()))


def _decision(source: str, record: dict[str, Any]) -> Iterator[Entry]:
    choice, cause = record["choice"], str(record.get("cause", "new"))
    chosen = choice.get("replica") or choice.get("name") or "?"
    why = choice.get("reason") or choice.get("why") or ""
    asked = (record.get("asked") or {}).get("id", "")
    said = f"request {asked}: {cause} to {chosen}" + (f": {why}" if why else "")
    level: Level = "info" if cause == "new" else "notable"
    yield Entry(float(record["at"]), source, said, level, "decision", str(chosen), (("cause", cause),))


def _request(source: str, record: dict[str, Any]) -> Iterator[Entry]:
    status = int(record["status"])
    is_bad = status >= 500 or bool(record.get("error"))
    said = f"request {record['request_id']}: {record.get('path', '')} answered {status}"
    said += f" after {record['seconds']:.3f} s" if isinstance(record.get("seconds"), int | float) else ""
    said += f", {record['error']}" if record.get("error") else ""
    when = datetime.fromisoformat(str(record["time"])).timestamp()
    yield Entry(when, source, said, "bad" if is_bad else "info", "request", "", (("is_bad", is_bad),))


def _spans(source: str, record: dict[str, Any]) -> Iterator[Entry]:
    """Spans in OTLP's JSON, as collectors write them to files."""
    for resource in record["resourceSpans"]:
        for scope in resource.get("scopeSpans", ()):
            for span in scope.get("spans", ()):
                begin, end = (int(span[name]) / _NS_PER_S for name in ("startTimeUnixNano", "endTimeUnixNano"))
                is_bad = (span.get("status") or {}).get("code") == _STATUS_ERROR
                said = f"span {span.get('name', '?')} took {end - begin:.3f} s" + (" and failed" if is_bad else "")
                yield Entry(begin, source, said, "bad" if is_bad else "info", "span")


_KINDS: dict[str, Callable[[str, dict[str, Any]], Iterator[Entry]]] = {
    "event": _event,
    "candidates": _decision,
    "resourceSpans": _spans,
    "request_id": _request,
}
"""By a field that only lines of this kind have."""


def _listed(facts: dict[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in facts.items())


# ── logs ──────────────────────────────────────────────────────────────────────────────────────────────────────────────
def _log_entries(path: Path, lines: list[str]) -> Iterator[Entry]:
    """Log lines have no date: the last one was written on the day of the file's last change, and time runs forwards."""
    day = datetime.fromtimestamp(path.stat().st_mtime).date()
    found: list[Entry] = []
    later: timedelta | None = None
    for line in reversed(lines):
        parts = _LOG_LINE.match(line)
        if parts is None:
            continue
        hours, minutes, seconds, thousandths = (int(parts[number]) for number in range(1, 5))
        since = timedelta(hours=hours, minutes=minutes, seconds=seconds, milliseconds=thousandths)
        if later is not None and since > later + timedelta(hours=1):  # Processes that share a file are not in order.
            day -= timedelta(days=1)
        later = since
        level = _LEVELS.get(parts[5], "info")
        said = f"{path.stem}{parts[6]}: {parts[7]}"
        found.append(Entry(_at(day, since), path.name, said, level, "log", path.stem))
    yield from reversed(found)


def _at(day: date, since: timedelta) -> float:
    return (datetime.combine(day, datetime.min.time()) + since).timestamp()


def shown_time(when: float) -> str:
    return datetime.fromtimestamp(when, UTC).strftime("%Y-%m-%d %H:%M:%S.") + f"{int(when % 1 * 1000):03d}"
