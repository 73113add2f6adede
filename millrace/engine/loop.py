"""The engine's loop around the cycle: takes messages, sends outcomes, watches for hangs, reports, and sleeps when idle.

When idle, the loop blocks on the channel. When a step fails, the cycle finds the request that caused it; only that
request ends with an error.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict
from typing import get_args

import msgspec

from millrace.engine.adapters.service import SCAN_EVERY_S, EngineAdapters
from millrace.engine.constrained import ConstrainedRequests
from millrace.engine.cycle import Confirmed, Cycle
from millrace.engine.figures.draft_figures import DraftFigures
from millrace.engine.figures.rates import MeasuredRates
from millrace.engine.figures.row_drafts import RowDraftCounts, step_drafts
from millrace.engine.figures.step_figures import StepFigures
from millrace.engine.figures.uncounted import UncountedSteps, UncountedTimes
from millrace.engine.fronts.forgetting import Forgetting
from millrace.engine.fronts.kv_events import KvEventFeed
from millrace.engine.fronts.outbox import Outbox
from millrace.engine.fronts.queries import Queries
from millrace.engine.fronts.requests import to_request
from millrace.engine.ledger import Ledger
from millrace.engine.parts import NO_PARTS, EngineParts
from millrace.engine.watchdog import Watchdog
from millrace.host import idle_memory
from millrace.host.time_slice import request_short_slices
from millrace.link.block_parts import PartOfPrefix
from millrace.link.channel import EngineChannel
from millrace.link.engine_stats import EngineStats, GrammarStats
from millrace.link.messages import (
    Abort,
    AbortFront,
    AdapterNames,
    AdapterQuery,
    EndSearch,
    EngineReady,
    EngineRetired,
    Finish,
    Hello,
    Idleness,
    NewRequest,
    Query,
    Reply,
    Retire,
    Stop,
    ToEngine,
    WatchKv,
)
from millrace.params.classes import FinishReason
from millrace.params.sampling import SamplingParams
from millrace.plan.planner.protocol import Planner
from millrace.plan.request import Request, end_of
from millrace.plan.step import Ended, StepPlan
from millrace.run.device.device import Device
from millrace.run.facts import RunnerFacts
from millrace.run.protocol import AnyRunner

log = logging.getLogger(__name__)

STATS_EVERY_S = 0.25
CHECK_POOL_EVERY = 4096
"""Steps between checks of the pool equation."""
BLOCKED_WAIT_S = 0.05
"""Wait for messages when there is work but no step can be planned."""
SETTLE_S = 3.0
"""At the end, longest time for which cached KV blocks are written to the disk."""
TAKE_IN_S = 0.002
"""Longest time for which messages are taken in before the next step is launched, or half the time of the last step if
that is longer: in a burst the device begins with the first requests. What is left waits for the next turn."""
RANK_CHECK_S = 1.0
"""An idle engine looks so often whether other ranks are there."""
ADAPTER_QUERIES = get_args(AdapterQuery)
CANCELLED = "The request was cancelled."
COMPILING_WAIT_S = 0.002
"""Wait for messages while a grammar is being compiled and there is no other work."""


class Engine:
    def __init__(
        self,
        scheduler: Planner,
        runner: AnyRunner,
        device: Device,
        channel: EngineChannel,
        *,
        facts: RunnerFacts,
        clock: Callable[[], float] = time.monotonic,
        parts: EngineParts = NO_PARTS,
    ) -> None:
        """`facts`: the runner's. `parts`: closed with the engine."""
        self._scheduler, self._facts = scheduler, facts
        self._shares_by_adapter = parts.shares_by_adapter
        self._constrained, self._mirror, self._ranks = parts.constrained, parts.mirror, parts.ranks
        self._disk = parts.disk
        self.device = device
        self._channel = channel
        self._clock = clock
        self._ledger = Ledger(None if parts.has_figures else UncountedTimes(), parts.timed_adapters)
        self.adapters = parts.adapters(self._ledger.adapters)
        forgetting = Forgetting(scheduler, self._ledger, parts.disk, self._abort)
        self._rates = MeasuredRates()
        self._outbox = Outbox(channel, self._ledger)
        self._kv_events = KvEventFeed(channel, scheduler.watched_blocks)
        count_steps = StepFigures if parts.has_figures else UncountedSteps
        self._figures = count_steps(
            scheduler.rows, self._ledger.histograms, parts.work, self._ledger.adapter_histograms
        )
        self._drafts = DraftFigures(parts.drafter)
        self._row_drafts = RowDraftCounts(scheduler.rows.capacity, parts.drafter)
        self._ledger.take_drafts = self._row_drafts.take
        self.ready: EngineReady | None = None
        """Sent to fronts that connect late."""
        self.on_hang: Callable[[], None] | None = None
        """Called from the watchdog thread when a step hangs."""
        self.on_idle: Callable[[], None] = idle_memory.collect_young
        """Called once each time the engine becomes idle."""
        self._cycle = Cycle(
            scheduler,
            runner,
            self,
            facts=facts,
            clock=clock,
            probe=self._probe,
            masks=parts.constrained,
            copier=parts.disk,
        )
        asked = (self._ledger, self._figures, parts.transfers, forgetting)
        self._queries = Queries(scheduler, *asked, clock=clock, cancel=self._cancel)
        self._left_over: deque[ToEngine] = deque()
        """Messages that arrived and are not handled yet."""
        self._stopping = False
        self._progressed = False
        self._idle_since: float | None = None
        self._reported_idle = self._is_trimmed = False
        self._poll_s = 0.0
        """How long the next wait for messages polls before it blocks."""
        self._used_at = clock()
        """When a request last arrived or ended."""
        self._step_no = 0
        self._host_seconds = 0.0
        self._stats_at = 0.0

    def run(self) -> None:
        """Run until a `Stop` message arrives."""
        watchdog = Watchdog(lambda: self._cycle.oldest, on_hang=self.on_hang, clock=self._clock)
        watchdog.start()
        request_short_slices()
        try:
            self._loop()
        finally:
            watchdog.stop()
            self._cycle.close()
            if self._disk is not None:
                self._disk.close()
            if self._ranks is not None:
                self._ranks.close()  # Before the device: a step may wait for a rank.
            self.device.close()
            if self._constrained is not None:
                self._constrained.shut_down()
            if self.adapters is not None:
                self.adapters.shut_down(is_in_order=self._stopping)
            if self._mirror is not None:
                self._mirror.close()

    def _probe(self) -> None:
        """Raise if no step can run any more."""
        self.device.probe()
        if self._ranks is not None:
            self._ranks.check()

    def _loop(self) -> None:
        while True:
            self._take_messages()
            if self._ranks is not None:
                self._ranks.check()
            if self._stopping:
                if self._disk is not None:
                    self._cycle.settle(SETTLE_S)
                return
            if self.adapters is not None:
                self._take_loaded(self.adapters)
            if self._constrained is not None:
                self._take_compiled(self._constrained)
            began, waited_before = self._clock(), self._cycle.times.waited_s
            try:
                self._progressed = self._cycle.advance()
            except Exception as error:
                self._recover(error)
            self._host_seconds += self._clock() - began - (self._cycle.times.waited_s - waited_before)

    def _recover(self, error: Exception) -> None:
        culprit = self._cycle.recover(error)
        if culprit is None:
            return
        entry = self._ledger.entry(culprit.request_id)
        name = " ".join(entry.names) if entry else culprit.request_id
        log.error("request %s caused the failure and ends with an error", name)
        message = f"The step that computed this request failed: {culprit.error}"
        self._scheduler.abort(culprit.request_id, "error", message)
        self.on_ended(self._scheduler.take_ended(), self._clock())

    def _take_messages(self) -> None:
        timeout_s = 0.0 if self._left_over else self._wait_timeout()
        poll_s, self._poll_s = self._poll_s, 0.0
        messages = self._left_over
        messages += self._channel.receive(timeout_s, poll_s)
        if not messages:
            return
        self._idle_since = None
        self._reported_idle = False
        until = self._clock() + max(TAKE_IN_S, self._cycle.last_device_s / 2)
        while messages:
            self._handle(messages.popleft())
            if self._clock() >= until:
                break

    def _take_compiled(self, constrained: ConstrainedRequests) -> None:
        """Schedule requests whose grammar is compiled; end those whose grammar failed."""
        for request in constrained.take_ready(self._clock()) if constrained.is_compiling else ():
            self._scheduler.submit(request)
        for failure in constrained.take_failed():
            self._abort(failure.request_id, failure.reason, failure.message)

    def _take_loaded(self, adapters: EngineAdapters) -> None:
        """Schedule requests whose adapter is on the device; end those whose adapter cannot be used."""
        now = self._clock()
        replies = adapters.advance(now)
        for request, params in adapters.take_ready():
            self._submit_ready(request, params)
        for failure, is_late in adapters.take_failed(now):
            self._abort(failure.request_id, "deadline" if is_late else "error", failure.message)
        if (names := adapters.changed_names()) is not None:
            if self.ready is not None:
                self.ready = msgspec.structs.replace(self.ready, adapters=names)
            self._channel.send_all(AdapterNames(names))
        for front, reply in replies:  # After the names, so that whoever was answered finds the adapter.
            self._channel.send(front, reply)

    # -- told by the cycle -----------------------------------------------------------------------------------------

    def on_launched(self, plan: StepPlan, now: float) -> None:
        for release in plan.released:
            if release.reason == "preempted":
                self._ledger.on_preempted(release.request_id, self._figures.last_token_at(release.row))
        for admission in plan.admitted:
            last_token = self._ledger.on_admitted(admission.request_id, now)
            if last_token is not None:
                self._figures.on_admitted(admission.row, last_token, self._ledger.adapter_of(admission.request_id))
            self._ledger.on_drafts(*self._row_drafts.admit(admission.row, admission.request_id))
        self._rates.on_admitted(len(plan.admitted))

    def on_tokens(self, done: Confirmed) -> None:
        self._step_no = done.plan.step_no
        drafted = step_drafts(done.plan, done.result)
        if drafted is not None:
            self._row_drafts.add(drafted)
        for finish in self._outbox.send_step(done.outcome, done.result, done.at):
            self._used_at = done.at
            if finish.output_tokens:
                self._rates.on_ended(finish.total_s - finish.queued_s)
            self._close(finish.id, finish.reason, finish)

    def on_step_done(self, done: Confirmed) -> None:
        self._rates.on_step(done.plan.num_tokens, done.device_s)
        self._figures.on_step(done)
        self._drafts.on_step(done.plan, done.result)
        self._kv_events.on_step(done.at)
        if done.at - self._stats_at >= STATS_EVERY_S:  # After the tokens, which clients wait for.
            self._report(done.at)
        if done.plan.step_no % CHECK_POOL_EVERY == 0:
            self._scheduler.check_sums()

    def on_ended(self, ended: tuple[Ended, ...], now: float) -> None:
        self._outbox.send_ended(self._step_no, ended, now)
        if ended:
            self._used_at = now
        for event in ended:
            self._close(event.request_id, event.reason)

    def _close(self, request_id: int, reason: FinishReason, finish: Finish | None = None) -> None:
        if self._constrained is not None:
            self._constrained.close(request_id)
        if self.adapters is not None:
            self.adapters.close(request_id, reason, finish)

    # -- waiting ---------------------------------------------------------------------------------------------------

    def _wait_timeout(self) -> float | None:
        """Timeout for the next wait for messages: 0 with work in progress, None (no limit) when idle."""
        if self._cycle.num_launched or self._progressed:
            return 0.0
        if (look_again_s := self._cycle.look_again_s) is not None:
            return look_again_s
        if self._scheduler.has_work:
            return BLOCKED_WAIT_S
        if self._constrained is not None and self._constrained.is_compiling:
            return COMPILING_WAIT_S
        if self.adapters is not None and self.adapters.is_loading:
            return COMPILING_WAIT_S
        if self.adapters is not None and self.adapters.has_waiting:
            return BLOCKED_WAIT_S
        if self._cycle.warm_next():
            return 0.0
        return self._idle()

    def _idle(self) -> float | None:
        """Timeout when there is nothing to do: poll briefly, report, wait for a while, release memory, then block."""
        if self._idle_since is None:
            self._idle_since, self._is_trimmed = self._clock(), False
            self._poll_s = self.device.poll_s
            if self._poll_s > 0:
                return self._poll_s
        if not self._reported_idle:
            self._reported_idle = True
            if self._mirror is not None:
                self._mirror.settle()
            self._kv_events.flush()
            self._report(self._clock())
            self.on_idle()
        if self._clock() - self._idle_since < idle_memory.IDLE_S:
            return self._idle_wait(idle_memory.IDLE_S)
        if not self._is_trimmed:
            self._is_trimmed = True
            idle_memory.trim_heap()
        return self._idle_wait(None)

    def _idle_wait(self, wanted: float | None) -> float | None:
        """Other ranks may be lost while nothing runs, and adapters may be put into a watched directory."""
        if self._ranks is not None:
            return RANK_CHECK_S
        return SCAN_EVERY_S if self.adapters is not None and self.adapters.is_watching else wanted

    # -- messages --------------------------------------------------------------------------------------------------

    def _handle(self, message: ToEngine) -> None:
        if isinstance(message, NewRequest):
            has_drafts, by_adapter = self._scheduler.has_drafts, self._shares_by_adapter
            request = to_request(message, self._facts, has_drafts=has_drafts, shares_by_adapter=by_adapter)
            self._ledger.open(message, request, self._clock())
            self._rates.on_arrival(request.priority)
            self._used_at = self._clock()
            if self._ledger.is_cancelled(request.id):
                self.on_ended((end_of(request, "cancelled", request.num_output, message=CANCELLED),), self._clock())
            else:
                self._submit(request, message.params)
        elif isinstance(message, Abort):
            for request_id in message.ids:
                self._abort(request_id, message.reason)
        elif isinstance(message, Stop):
            self._stopping = True
        else:
            self._handle_rare(message)

    def _submit(self, request: Request, params: SamplingParams) -> None:
        if not params.adapter:
            self._submit_ready(request, params)
        elif self.adapters is None:
            message = f"There is no adapter {params.adapter[:200]!r}: this model takes none."
            self.on_ended((end_of(request, "error", request.num_output, message=message),), self._clock())
        elif not self.adapters.hold(request, params):
            self._submit_ready(request, params)

    def _submit_ready(self, request: Request, params: SamplingParams) -> None:
        """Nothing but a grammar is missing."""
        if not request.constrained:
            self._scheduler.submit(request)
        elif self._constrained is not None:
            if not self._constrained.hold(request, params, self._clock()):
                self._scheduler.submit(request)
        else:
            message = "This model's tokenizer cannot be used with grammars, so response_format is not supported."
            self.on_ended((end_of(request, "error", request.num_output, message=message),), self._clock())

    def _abort(self, request_id: int, reason: FinishReason, message: str = "") -> None:
        """End a request, whether it is held back, waiting or running. Unknown ids are ignored."""
        held = self._constrained.drop(request_id) if self._constrained is not None else None
        if held is None and self.adapters is not None:
            held = self.adapters.drop(request_id)
        if held is not None:
            self.on_ended((end_of(held, reason, held.num_output, message=message),), self._clock())
        else:
            self._scheduler.abort(request_id, reason, message)

    def _cancel(self, request_id: int) -> None:
        self._abort(request_id, "cancelled", CANCELLED)

    def _handle_rare(self, message: AbortFront | EndSearch | Hello | PartOfPrefix | Query | Retire | WatchKv) -> None:
        if isinstance(message, EndSearch):
            self._ledger.close_search(message.finish)
            self._used_at = self._clock()
        elif isinstance(message, AbortFront):
            for request_id in self._ledger.of_front(message.front):
                self._abort(request_id, "abort")
            self._ledger.abort_searches(message.front, self._clock())
            self._kv_events.watch(message.front, is_on=False)
        elif isinstance(message, Hello):
            if self.ready is not None:
                self._channel.send(message.front, self.ready)
        elif isinstance(message, Retire):
            self._retire(message)
        elif isinstance(message, WatchKv):
            self._kv_events.watch(message.front, is_on=message.is_on)
        elif isinstance(message, PartOfPrefix):
            self._channel.send(message.front, Reply(message.query_id, self._queries.transfer(message)))
        elif message.kind in ADAPTER_QUERIES:
            reply = Reply(message.query_id) if self.adapters is None else self.adapters.answer(message)
            if reply is not None:
                self._channel.send(message.front, reply)
        else:
            self._channel.send(message.front, Reply(message.query_id, self._queries.answer(message)))

    def _retire(self, message: Retire) -> None:
        """Stop if no request is open and none was for the time asked. A request that is still on its way is kept by its
        front, which learns here that this engine will not answer it."""
        num_open = len(self._ledger)
        idle_s = 0.0 if num_open else max(0.0, self._clock() - self._used_at)
        self._stopping = self._stopping or (num_open == 0 and idle_s >= message.idle_s)
        idleness = Idleness(self._stopping, num_open, idle_s)
        self._channel.send(message.front, Reply(message.query_id, msgspec.json.encode(idleness)))
        if self._stopping:
            self._channel.send_all(EngineRetired())

    # -- statistics ------------------------------------------------------------------------------------------------

    def _report(self, now: float) -> None:
        self._stats_at = now
        self._outbox.send_stats(self._step_no, self._stats())

    def _stats(self) -> EngineStats:
        rates, times, figures, ledger = self._rates, self._cycle.times, self._figures, self._ledger
        rates.sample(self._stats_at)
        self._scheduler.observe_speed(rates.tokens_per_s)
        planned = self._scheduler.figures(self._stats_at)
        figures.count()
        return EngineStats(
            step_no=self._step_no,
            prompt_tokens=ledger.prompt_tokens,
            output_tokens=figures.output_tokens,
            step_seconds=times.step_s,
            plan_seconds=times.plan_s,
            host_seconds=self._host_seconds,
            admissions_per_s=rates.admissions_per_s(planned.running + (0 if planned.waiting else planned.rows_free)),
            arrivals_per_s=rates.arrivals_per_s(),
            tokens_per_s=rates.tokens_per_s,
            mean_step_s=rates.step_s,
            grammars=self._constrained.stats if self._constrained is not None else GrammarStats(),
            histograms=ledger.histograms.tobytes(),
            latencies=ledger.histograms.take_sketch(),
            adapter_histograms={name: one.tobytes() for name, one in ledger.adapter_histograms.items()},
            launch_seconds=times.launch_s,
            device_seconds=times.device_s,
            apply_seconds=times.apply_s,
            step_rows=figures.step_rows,
            prefill_tokens=figures.prefill_tokens,
            decode_tokens=figures.decode_tokens,
            padded_tokens=figures.padded_tokens,
            drafted_tokens=figures.drafted_tokens,
            accepted_tokens=figures.accepted_tokens,
            drafts=self._drafts.stats(),
            draft_steps=self._drafts.num_steps,
            cached_tokens=ledger.cached_tokens,
            bytes_read=figures.bytes_read,
            flops=figures.flops,
            running_by_class=figures.running_by_class(),
            tenants=ledger.tenants.figures(),
            finished=dict(ledger.finished),
            forced_tokens=self._cycle.num_jumped,
            mirror=None if self._mirror is None else self._mirror.stats,
            adapters=None if self.adapters is None else self.adapters.stats,
            **asdict(planned),
        )
