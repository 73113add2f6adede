"""Timelines as files for https://ui.perfetto.dev, in the Chrome trace event format, and as bars in a terminal."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

STAGES = ("front", "link", "lost", "queue", "prefill", "decode")


@dataclass(frozen=True, slots=True)
class Slice:
    name: str
    start_s: float
    seconds: float
    track: str
    details: dict[str, Any]


def request_slices(explanation: dict[str, Any]) -> list[Slice]:
    """The stages of each sequence, from its HTTP headers on."""
    found = []
    for number, sequence in enumerate(explanation["sequences"]):
        at, stages = 0.0, sequence["stages_s"]
        for name in STAGES:
            if name in stages:
                found.append(Slice(name, at, stages[name], f"sequence {number}", {}))
                at += stages[name]
    return found


def step_slices(steps: dict[str, Any]) -> list[Slice]:
    """One slice per step, at the time for which it occupied the device."""
    if not steps["step_no"]:
        return []
    first = min(done - device_s for done, device_s in zip(steps["done"], steps["device_s"], strict=True))
    found = []
    for index, number in enumerate(steps["step_no"]):
        seconds = steps["device_s"][index]
        names = ("rows", "prefill_tokens", "decode_tokens", "bytes", "flops")
        details = {name: steps[name][index] for name in names}
        kind = "prefill" if details["prefill_tokens"] else "decode"
        start = steps["done"][index] - seconds - first
        found.append(Slice(f"{kind} {details['rows']} rows", start, seconds, "device", {"step": number, **details}))
    return found


def trace_file(slices: Iterable[Slice], process: str) -> dict[str, Any]:
    tracks: dict[str, int] = {}
    events: list[dict[str, Any]] = [{"ph": "M", "pid": 1, "name": "process_name", "args": {"name": process}}]
    for one in slices:
        track = tracks.setdefault(one.track, len(tracks) + 1)
        events.append(
            {
                "ph": "X",
                "pid": 1,
                "tid": track,
                "name": one.name,
                "ts": round(1e6 * one.start_s, 1),
                "dur": round(1e6 * one.seconds, 1),
                "args": one.details,
            }
        )
    for name, track in tracks.items():
        events.append({"ph": "M", "pid": 1, "tid": track, "name": "thread_name", "args": {"name": name}})
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def bars(slices: list[Slice], width: int = 60) -> list[str]:
    """One line per slice: its name, where it lies in the whole, and its time."""
    if not slices:
        return []
    end = max(one.start_s + one.seconds for one in slices) or 1e-9
    lines = []
    for one in slices:
        before = round(width * one.start_s / end)
        length = max(1, round(width * one.seconds / end)) if one.seconds > 0 else 0
        bar = (" " * before + "█" * length)[:width]
        lines.append(f"{one.name:<18} {bar:<{width}} {1e3 * one.seconds:10.2f} ms")
    return lines
