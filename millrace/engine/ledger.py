"""The ledger: times and outcome of each request. Every submitted request gets exactly one `Finish`.

Requests can be found by the ids that clients know, while open and for some time after, so any front can explain or
cancel them.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

from millrace.engine.figures.row_drafts import DraftCounts
from millrace.engine.figures.shares import Shares
from millrace.link.messages import FRONT_SHIFT, MAX_FINISHED_KEPT, Finish, NewRequest, Resumption
from millrace.observe.histograms import TTFT, Histograms
from millrace.plan.request import Diagnostics, Request
from millrace.plan.step import Ended


@dataclass(slots=True)
class Entry:
    """Times are on `time.monotonic`, in the order of the fields."""

    received: float
    """When the front had received the HTTP headers."""
    arrival: float
    """When the front submitted the request."""
    taken: float = 0.0
    """When the engine took it from the channel."""
    admitted: float | None = None
    first_token: float | None = None
    owes_prompt_logprobs: bool = False
    names: tuple[str, ...] = ()
    tenant: str = ""
    adapter: str = ""
    request_id: int = 0
    priority: int = 1
    num_prompt: int = 0
    diagnostics: Diagnostics = field(default_factory=Diagnostics)
    drafts: DraftCounts = field(default_factory=dict)
    finish: Finish | None = None
    last_token: float = math.nan
    """While it has no row: when it got its last token."""
    is_running: bool = False
    search: Entry | None = None
    """The beam search that it is a step of: that one counts, and has the names."""
    is_cancelled: bool = False
    """Of a search: its further steps end at once."""
    resumed: Resumption | None = None
    """What another engine computed of it."""

    @property
    def has_come_with_tokens(self) -> bool:
        return self.resumed is not None and bool(self.resumed.output)


class Ledger:
    def __init__(self, histograms: Histograms | None = None, timed_adapters: Iterable[str] = ()) -> None:
        """`timed_adapters`: those whose requests have histograms of their own."""
        self._entries: dict[int, Entry] = {}
        self._searches: dict[int, Entry] = {}
        """Open beam searches, with times and diagnostics of their first step."""
        self._named: dict[str, list[Entry]] = {}
        self._ended: OrderedDict[int, Entry] = OrderedDict()
        self.prompt_tokens = 0
        """Of requests that got their first token."""
        self.cached_tokens = 0
        self.finished: Counter[str] = Counter()
        """Ended requests by finish reason."""
        self.histograms = histograms or Histograms()
        self.adapter_histograms = {name: Histograms() for name in timed_adapters}
        self.tenants = Shares()
        self.adapters = Shares()
        """Of requests with an adapter, by its name."""
        self.take_drafts: Callable[[int], DraftCounts] = lambda _: {}
        """Drafts of a request that are counted elsewhere and not noted here yet."""

    def __len__(self) -> int:
        """Open requests. Between two of its steps, a search is one."""
        return len(self._entries) + len(self._searches)

    def __contains__(self, request_id: int) -> bool:
        return request_id in self._entries

    def open(self, message: NewRequest, request: Request, now: float) -> None:
        entry = Entry(
            arrival=message.arrival or now,
            received=message.received or message.arrival or now,
            taken=now,
            owes_prompt_logprobs=message.params.prompt_logprobs is not None,
            names=message.names,
            tenant=message.tenant,
            adapter=message.params.adapter,
            request_id=message.id,
            priority=request.priority,
            num_prompt=request.num_prompt,
            diagnostics=request.diagnostics,
            resumed=message.resumed,
        )
        if message.resumed is not None and message.resumed.output:
            entry.first_token, entry.last_token = message.resumed.first_token, message.resumed.lost
        self._entries[message.id] = entry
        self.tenants.open(message.tenant)
        if entry.adapter:
            self.adapters.open(entry.adapter)
        if message.search is None:
            self._name(entry)
            return
        if message.search not in self._searches:
            self._searches[message.search] = replace(entry, request_id=message.search)
            self._name(self._searches[message.search])
        entry.search = self._searches[message.search]

    def _name(self, entry: Entry) -> None:
        for name in entry.names:
            self._named.setdefault(name, []).append(entry)

    def entry(self, request_id: int) -> Entry | None:
        return self._entries.get(request_id)

    def adapter_of(self, request_id: int) -> str:
        """Empty if it has none, or has ended."""
        entry = self._entries.get(request_id)
        return "" if entry is None else entry.adapter

    def named(self, name: str, tenant: str | None) -> list[Entry]:
        """Open and remembered requests with this name, of this tenant (None = of any)."""
        found = [entry for entry in self._named.get(name, ()) if tenant is None or entry.tenant == tenant]
        for entry in found:
            self.on_drafts(entry.request_id, self.take_drafts(entry.request_id))
        return found

    def of_front(self, front: int) -> list[int]:
        return [request_id for request_id in self._entries if front_of(request_id) == front]

    def of_tenant(self, tenant: str) -> list[int]:
        """Open requests. Its searches end with their steps."""
        for search in self._searches.values():
            search.is_cancelled |= search.tenant == tenant
        return [request_id for request_id, entry in self._entries.items() if entry.tenant == tenant]

    def forget_prompts(self, tenant: str) -> None:
        """Keep no part of what this tenant asked."""
        for entry in (*self._entries.values(), *self._ended.values()):
            if entry.tenant == tenant:
                entry.diagnostics.divergence = None

    def abort_searches(self, front: int, now: float) -> None:
        """This front is gone, and will not end its searches."""
        for search, entry in [one for one in self._searches.items() if front_of(one[0]) == front]:
            total_s = now - entry.arrival
            self.close_search(Finish(id=search, reason="abort", prompt_tokens=entry.num_prompt, total_s=total_s))

    def cancel(self, entry: Entry) -> list[int]:
        """The open sequences of an entry that is to be cancelled: itself, or the steps of a search."""
        entry.is_cancelled = True
        if entry.request_id in self._entries:
            return [entry.request_id]
        return [request_id for request_id, one in self._entries.items() if one.search is entry]

    def is_cancelled(self, request_id: int) -> bool:
        """True for a step of a search that was cancelled before it came."""
        search = self._entries[request_id].search
        return search is not None and search.is_cancelled

    def on_admitted(self, request_id: int, now: float) -> float | None:
        """Returns when it got its last token (NaN if it has none), or None if it was running already."""
        entry = self._entries.get(request_id)
        if entry is None or entry.is_running:
            return None
        if entry.admitted is None:
            entry.admitted = now
            if entry.search is not None and entry.search.admitted is None:
                entry.search.admitted = now
        entry.is_running = True
        self.tenants.start(entry.tenant)
        if entry.adapter:
            self.adapters.start(entry.adapter)
        return entry.last_token

    def on_preempted(self, request_id: int, last_token: float) -> None:
        """`last_token`: when it got its last token; NaN if it has none."""
        entry = self._entries.get(request_id)
        if entry is not None and entry.is_running:
            entry.is_running, entry.last_token = False, last_token
            self.tenants.pause(entry.tenant)
            if entry.adapter:
                self.adapters.pause(entry.adapter)

    def on_drafts(self, request_id: int, counts: DraftCounts) -> None:
        """Steps verified drafts of the request."""
        entry = self._entries.get(request_id)
        if entry is None:
            return
        for drafter, more in counts.items():
            before = entry.drafts.get(drafter, (0, 0, 0))
            entry.drafts[drafter] = before[0] + more[0], before[1] + more[1], before[2] + more[2]

    def on_first_token(self, request_id: int, now: float) -> bool:
        """Note the time. Returns True, once, if the prompt's log-probabilities must be sent with this token."""
        entry = self._entries.get(request_id)
        if entry is None:
            return False
        entry.first_token = now
        if entry.search is not None:
            if entry.search.first_token is not None:
                return False
            entry = entry.search
            entry.first_token = now
        self.prompt_tokens += entry.num_prompt
        for one in self._histograms_of(entry):
            one.observe(TTFT, entry.priority, now - entry.received)
        owed, entry.owes_prompt_logprobs = entry.owes_prompt_logprobs, False
        return owed

    def close(self, ended: Ended, now: float) -> Finish:
        """Record the end of a request."""
        self.on_drafts(ended.request_id, self.take_drafts(ended.request_id))
        entry = self._entries.pop(ended.request_id)
        _, predicted, predicted_accepted = entry.drafts.get("prediction", (0, 0, 0))
        entry.finish = Finish(
            id=ended.request_id,
            reason=ended.reason,
            message=ended.message,
            stop_token_id=ended.stop_token_id,
            cached_tokens=ended.cached_tokens,
            prompt_tokens=ended.num_prompt,
            output_tokens=ended.num_output,
            preemptions=ended.preemptions,
            # What a request waited before its first token elsewhere is not known here.
            queued_s=0.0 if entry.has_come_with_tokens else (entry.admitted or now) - entry.arrival,
            first_token_s=entry.first_token - entry.arrival if entry.first_token is not None else 0.0,
            total_s=now - entry.arrival,
            predicted_tokens=predicted,
            predicted_accepted=predicted_accepted,
            retained_tokens=entry.diagnostics.retained_tokens,
            handle=entry.diagnostics.handle,
            resident_tokens=entry.diagnostics.resident_tokens,
            refused=entry.diagnostics.refused,
            placed_tokens=ended.placed_tokens,
        )
        self.tenants.close(entry.tenant, was_running=entry.is_running)
        if entry.adapter:
            self.adapters.close(entry.adapter, was_running=entry.is_running)
        if entry.search is None:
            self._count(entry, entry.finish)
        return entry.finish

    def close_search(self, finish: Finish) -> None:
        """Record the end of a search. Unknown ones are ignored."""
        entry = self._searches.pop(finish.id, None)
        if entry is not None:
            entry.finish = finish
            self._count(entry, finish)

    def _count(self, entry: Entry, finish: Finish) -> None:
        """Count and remember an ended request."""
        if entry.names:
            self._remember(entry)
        self.cached_tokens += finish.cached_tokens
        self.finished[finish.reason] += 1
        self.tenants.count(entry.tenant, finish, entry.diagnostics)
        if entry.adapter:
            self.adapters.count(entry.adapter, finish, entry.diagnostics)
        for one in self._histograms_of(entry):
            one.observe_finish(finish, entry.priority, entry.arrival - entry.received)

    def _histograms_of(self, entry: Entry) -> tuple[Histograms, ...]:
        own = self.adapter_histograms.get(entry.adapter)
        return (self.histograms,) if own is None else (self.histograms, own)

    def _remember(self, entry: Entry) -> None:
        self._ended[entry.request_id] = entry
        if len(self._ended) > MAX_FINISHED_KEPT:
            _, oldest = self._ended.popitem(last=False)
            for name in oldest.names:
                left = [other for other in self._named.get(name, ()) if other is not oldest]
                if left:
                    self._named[name] = left
                else:
                    self._named.pop(name, None)


def front_of(request_id: int) -> int:
    return request_id >> FRONT_SHIFT
