"""When things happened to each request, and how it ended: every submitted request leaves exactly one `Finish`."""

from __future__ import annotations

from dataclasses import dataclass

from millrace.link.messages import FRONT_SHIFT, Finish, NewRequest
from millrace.plan.step import Ended


@dataclass(slots=True)
class Entry:
    arrival: float
    admitted: float | None = None
    first_token: float | None = None
    owes_prompt_logprobs: bool = False


class Ledger:
    def __init__(self) -> None:
        self._entries: dict[int, Entry] = {}
        self.prompt_tokens = 0
        self.output_tokens = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, request_id: int) -> bool:
        return request_id in self._entries

    def open(self, request: NewRequest, now: float) -> None:
        self._entries[request.id] = Entry(
            arrival=request.arrival or now, owes_prompt_logprobs=request.params.prompt_logprobs is not None
        )

    def entry(self, request_id: int) -> Entry | None:
        return self._entries.get(request_id)

    def on_admitted(self, request_id: int, now: float) -> None:
        entry = self._entries.get(request_id)
        if entry is not None and entry.admitted is None:
            entry.admitted = now

    def on_first_token(self, request_id: int, now: float) -> None:
        entry = self._entries.get(request_id)
        if entry is not None:
            entry.first_token = now

    def close(self, ended: Ended, now: float) -> Finish:
        entry = self._entries.pop(ended.request_id)
        self.prompt_tokens += ended.num_prompt
        self.output_tokens += ended.num_output
        return Finish(
            id=ended.request_id,
            reason=ended.reason,
            message=ended.message,
            stop_token_id=ended.stop_token_id,
            cached_tokens=ended.cached_tokens,
            prompt_tokens=ended.num_prompt,
            output_tokens=ended.num_output,
            preemptions=ended.preemptions,
            queued_s=(entry.admitted or now) - entry.arrival,
            first_token_s=entry.first_token - entry.arrival if entry.first_token is not None else 0.0,
            total_s=now - entry.arrival,
        )


def front_of(request_id: int) -> int:
    return request_id >> FRONT_SHIFT
