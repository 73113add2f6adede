"""Explains, in figures and sentences, where a request spent its time: `GET /v1/requests/{id}/explain`."""

from __future__ import annotations

from typing import Any

from millrace.engine.ledger import Entry
from millrace.link.messages import Resumption, unpack_tokens
from millrace.params.classes import CLASS_NAMES
from millrace.plan.request import Diagnostics

_CAUSES = {
    "rows": "the maximum number of requests was running",
    "memory": "the KV pool had no room for it at the forecast peak",
    "budget": "the token budget went to requests ahead of it",
    "prefix": "another request was computing the same prefix, which it then reused",
}


def explain(entries: list[Entry], now: float) -> dict[str, Any]:
    """`entries`: one per choice of an HTTP request."""
    first = entries[0]
    return {
        "object": "request.explanation",
        "id": first.names[-1],
        "request_id": first.names[0],
        "state": _state(entries),
        "priority": CLASS_NAMES[min(first.priority, 2)],
        "sequences": [_sequence(entry, now) for entry in entries],
    }


def _state(entries: list[Entry]) -> str:
    if all(entry.finish is not None for entry in entries):
        return "ended"
    return "running" if any(entry.admitted is not None for entry in entries) else "waiting"


def _sequence(entry: Entry, now: float) -> dict[str, Any]:
    finish, diagnostics = entry.finish, entry.diagnostics
    return {
        "finish_reason": finish.reason if finish is not None else None,
        "message": finish.message if finish is not None and finish.message else None,
        "prompt_tokens": entry.num_prompt,
        "output_tokens": finish.output_tokens if finish is not None else None,
        "queue": {
            "ahead_on_arrival": diagnostics.num_ahead,
            "waited_for_s": {cause: round(seconds, 6) for cause, seconds in diagnostics.waited_for.items()},
            "why": _why_it_waited(entry, now),
        },
        "adapter": {
            "name": diagnostics.adapter,
            "waited_s": round(diagnostics.adapter_wait_s, 6),
            "why": _how_it_got_its_adapter(diagnostics),
        }
        if diagnostics.adapter
        else None,
        "cache": {
            "cached_tokens": finish.cached_tokens if finish is not None else None,
            "diverged_at_token": None if diagnostics.diverged is None else diagnostics.diverged.at,
            "why": _what_it_found(entry),
            **_text_around(entry.diagnostics),
            "handle": diagnostics.handle or None,
            "retained_tokens": diagnostics.retained_tokens,
            "refused": diagnostics.refused or None,
        },
        "preemptions": {
            "count": finish.preemptions if finish is not None else None,
            "reasons": diagnostics.preempted_for,
        },
        "resumed": {
            "count": entry.resumed.losses if entry.resumed is not None else 0,
            "why": _how_it_went_on(entry.resumed, entry.taken) if entry.resumed is not None else None,
        },
        "drafts": {
            drafter: {"steps": steps, "proposed": drafts, "accepted": accepted}
            for drafter, (steps, drafts, accepted) in entry.drafts.items()
        },
        "stages_s": _stages(entry, now),
    }


def _stages(entry: Entry, now: float) -> dict[str, float]:
    """Consecutive stages, which add up to the total. Stages that have not begun are omitted. "lost": until this engine
    took it over from one that died."""
    end = entry.arrival + entry.finish.total_s if entry.finish is not None else now
    marks: list[tuple[str, float | None]] = [
        ("front", entry.arrival),
        ("link" if entry.resumed is None else "lost", entry.taken),
        ("queue", entry.admitted),
    ]
    if entry.first_token is None or entry.first_token >= entry.taken:
        marks.append(("prefill", entry.first_token))
    marks.append(("decode", end))
    stages: dict[str, float] = {}
    before = entry.received
    for name, until in marks:
        stages[name] = round(max(0.0, (end if until is None else until) - before), 6)
        if until is None:
            break
        before = until
    stages["total"] = round(end - entry.received, 6)
    return stages


def _why_it_waited(entry: Entry, now: float) -> str:
    if entry.admitted is None:
        waited = (entry.arrival + entry.finish.total_s if entry.finish is not None else now) - entry.arrival
        return f"It waited {waited:.3f} s behind {entry.diagnostics.num_ahead} others and was not admitted."
    waited = entry.admitted - entry.arrival
    causes = sorted(entry.diagnostics.waited_for.items(), key=lambda item: -item[1])
    if waited < 0.001:
        return "It was admitted at once."
    if not causes:
        return f"It waited {waited:.3f} s for the running step to end or for its grammar to be compiled."
    parts = [f"{_CAUSES[cause]} ({seconds:.3f} s)" for cause, seconds in causes]
    return f"It waited {waited:.3f} s: " + "; ".join(parts) + "."


def _how_it_got_its_adapter(diagnostics: Diagnostics) -> str:
    waited = diagnostics.adapter_wait_s
    if waited < 0.001:
        return "The adapter was on the device."
    return f"It waited {waited:.3f} s for its adapter: to be read, or for a slot on the device."


def _how_it_went_on(resumed: Resumption, taken: float) -> str:
    num_tokens, waited = len(unpack_tokens(resumed.output)), taken - resumed.lost
    if not resumed.losses:
        return f"Another server generated {num_tokens} tokens of it; this one went on from there."
    when = f"after {num_tokens} tokens" if num_tokens else "before its first token"
    return f"Its engine died {when}; this one took it over {waited:.3f} s later and went on from there."


def _text_around(diagnostics: Diagnostics) -> dict[str, Any]:
    """For the front, which has the tokenizer and answers with what stands there instead."""
    diverged = diagnostics.diverged
    if diverged is None:
        return {}
    return {
        "around": unpack_tokens(diverged.around).tolist(),
        "around_from": diverged.around_from,
        "is_reordered": diverged.is_reordered,
    }


def _what_it_found(entry: Entry) -> str:
    diverged = entry.diagnostics.diverged
    if not entry.diagnostics.has_cache:
        return "The model reads every text whole; it has no prefix cache."
    if entry.admitted is None:
        return "It has not been looked up in the prefix cache yet."
    if diverged is not None:
        return f"Prompt token {diverged.at} is the first that differs from the cached prefix."
    if entry.finish is not None and entry.finish.cached_tokens:
        return "The whole cached prefix was used."
    return "No cached prefix matches this prompt."
