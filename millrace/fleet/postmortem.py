"""The timeline of an incident, in Markdown: what ended, for how long, what became of requests, and every line."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from millrace.errors import NotFound
from millrace.fleet.records import Entry, read_records, shown_time

MAX_LINES = 500


@dataclass(frozen=True, slots=True)
class Outage:
    """From the end of a member's process until it was ready again."""

    member: str
    began: float
    why: str
    ended: float | None


def collect(paths: Iterable[Path]) -> list[Entry]:
    """The entries of files, and of the files in directories, in the order of their times."""
    files: list[Path] = []
    for path in paths:
        if path.is_dir():
            files += sorted(one for one in path.iterdir() if one.suffix in (".jsonl", ".log", ".json"))
        elif path.is_file():
            files.append(path)
        else:
            raise NotFound(f"{path} does not exist; give a fleet's directory or files.")
    entries = [entry for file in files if file.name != "state.json" for entry in read_records(file)]
    if not entries:
        raise NotFound(f"There is nothing to read in {', '.join(map(str, paths))}.")
    return sorted(entries, key=lambda entry: entry.time)


def outages(entries: Sequence[Entry]) -> list[Outage]:
    found: list[Outage] = []
    open_since: dict[str, tuple[float, str]] = {}
    planned: set[str] = set()
    for entry in entries:
        event, member = entry.fact("event"), entry.member
        if entry.kind != "event":
            continue
        if event == "draining":
            planned.add(member)
        if event == "ended":
            open_since.setdefault(member, (entry.time, "it was restarted on purpose" if member in planned else ""))
        elif event == "waiting" and member in open_since:
            began, why = open_since[member]
            open_since[member] = began, why or str(entry.fact("why") or "")
        elif event == "ready":
            planned.discard(member)
            if member in open_since:
                began, why = open_since.pop(member)
                found.append(Outage(member, began, why or "unknown", entry.time))
        elif event == "stopped":  # On purpose.
            open_since.pop(member, None)
            planned.discard(member)
    found += [Outage(member, began, why or "unknown", None) for member, (began, why) in open_since.items()]
    return sorted(found, key=lambda one: one.began)


def report(entries: Sequence[Entry], *, shows_all: bool = False) -> str:
    """`shows_all`: also the lines in which nothing is wrong."""
    down = outages(entries)
    lines = ["# Postmortem", "", f"{shown_time(entries[0].time)} to {shown_time(entries[-1].time)} UTC.", ""]
    lines += ["## Members that were away", ""]
    lines += [f"- {_said(one)}" for one in down] or ["None."]
    lines += ["", "## Requests", "", *_requests(entries), "", "## Timeline (UTC)", ""]
    shown = [entry for entry in entries if shows_all or entry.level != "info"]
    left_out = len(shown) - MAX_LINES
    if left_out > 0:
        lines += [f"The first {left_out} of {len(shown)} lines are left out; choose a shorter time.", ""]
        shown = shown[-MAX_LINES:]
    marks = {"bad": "**!** ", "notable": "", "info": ""}
    lines += [f"- {shown_time(one.time)} {marks[one.level]}{_one_line(one.what)} ({one.source})" for one in shown]
    return "\n".join(lines) + "\n"


def _said(one: Outage) -> str:
    if one.ended is None:
        return f"{one.member} from {shown_time(one.began)} on, and was not back: {one.why}."
    return f"{one.member} for {one.ended - one.began:.1f} s from {shown_time(one.began)} on: {one.why}."


def _requests(entries: Sequence[Entry]) -> list[str]:
    requests = [entry for entry in entries if entry.kind == "request"]
    causes = Counter(entry.fact("cause") for entry in entries if entry.kind == "decision")
    failed = sum(bool(entry.fact("is_bad")) for entry in requests)
    lines = []
    if requests:
        lines.append(f"- {len(requests)} ended, {failed} of them with an error.")
    if causes:
        names = {"new": "first choices", "retry": "retries", "resume": "streams that moved", "hedge": "hedges"}
        parts = [f"{count} {names.get(str(cause), str(cause))}" for cause, count in causes.most_common()]
        lines.append(f"- The gateway's decisions: {', '.join(parts)}.")
    return lines or ["No audit log and no decision log were given."]


def _one_line(text: str) -> str:
    return " ".join(text.split())[:400]
