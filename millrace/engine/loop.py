"""The engine's loop: plan the next step while the last one is in flight, launch it, confirm the oldest.

When idle, the loop blocks on the channel. When a step fails, its rows are run again in halves until the request that
caused the failure is found; only that request ends with an error.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable

import msgspec

from millrace.engine.explain import explain
from millrace.engine.ledger import Ledger
from millrace.engine.outbox import Outbox
from millrace.engine.rates import MeasuredRates
from millrace.engine.watchdog import Watchdog
from millrace.host import idle_memory
from millrace.host.time_slice import request_short_slices
from millrace.link.channel import EngineChannel
from millrace.link.messages import (
    Abort,
    AbortFront,
    EngineReady,
    EngineStats,
    Hello,
    NewRequest,
    Query,
    Reply,
    Stop,
    ToEngine,
    unpack_tokens,
)
from millrace.params import RowParams
from millrace.plan.request import BATCH, INTERACTIVE, Request
from millrace.plan.scheduler import Scheduler
from millrace.plan.step import StepPlan
from millrace.run.device.device import Device, Pending
from millrace.run.runner import AnyRunner, StepResult

log = logging.getLogger(__name__)

STATS_EVERY_S = 0.25
CHECK_POOL_EVERY = 4096
"""Steps between checks of the pool equation."""
BLOCKED_WAIT_S = 0.05
"""Wait for messages when there is work but no step can be planned."""

Launched = tuple[StepPlan, Pending[StepResult], float]


class Engine:
    def __init__(
        self,
        scheduler: Scheduler,
        runner: AnyRunner,
        device: Device,
        channel: EngineChannel,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._scheduler = scheduler
        self._runner = runner
        self._device = device
        self._channel = channel
        self._clock = clock
        self._ledger = Ledger()
        self._rates = MeasuredRates()
        self._outbox = Outbox(channel, self._ledger)
        self.ready: EngineReady | None = None
        """Sent to fronts that connect late."""
        self.on_hang: Callable[[], None] | None = None
        """Called from the watchdog thread when a step hangs."""
        self.on_idle: Callable[[], None] = idle_memory.collect_young
        """Called once each time the engine becomes idle."""
        self._launched: deque[Launched] = deque()
        self._stopping = False
        self._progressed = False
        self._idle_since: float | None = None
        self._reported_idle = False
        self._poll_s = 0.0
        """How long the next wait for messages polls before it blocks."""
        self._step_no = 0
        self._step_seconds = 0.0
        self._plan_seconds = 0.0
        self._host_seconds = 0.0
        self._waited_s = 0.0
        """Seconds that this iteration of the loop waited for the device."""
        self._stats_at = 0.0
        self._applied_at = 0.0

    def run(self) -> None:
        """Run until a `Stop` message arrives."""
        watchdog = Watchdog(self._oldest_launched, on_hang=self.on_hang)
        watchdog.start()
        request_short_slices()
        try:
            self._loop()
        finally:
            watchdog.stop()
            self._device.close()

    def _oldest_launched(self) -> tuple[StepPlan, float] | None:
        try:
            plan, _, launched_at = self._launched[0]
        except IndexError:
            return None
        return plan, launched_at

    def _loop(self) -> None:
        while True:
            self._take_messages()
            if self._stopping:
                return
            began = self._clock()
            self._waited_s = 0.0
            try:
                launched = self._launch_next()
                # Keep two steps in flight: plan one more before waiting for the oldest.
                self._progressed = launched or bool(self._launched)
                if self._launched and (len(self._launched) > 1 or not launched):
                    self._apply_oldest()
            except Exception as error:
                self._recover(error)
            self._host_seconds += self._clock() - began - self._waited_s

    def _take_messages(self) -> None:
        timeout_s = self._wait_timeout()
        poll_s, self._poll_s = self._poll_s, 0.0
        for message in self._channel.receive(timeout_s, poll_s):
            self._idle_since = None
            self._reported_idle = False
            self._handle(message)

    def _launch_next(self) -> bool:
        started = self._clock()
        plan = self._scheduler.plan(started)
        self._plan_seconds += self._clock() - started
        if ended := self._scheduler.take_ended():
            self._outbox.send_ended(self._step_no, ended, started)
        if plan is None:
            return False
        self._launch(plan, started)
        launched = self._clock()
        self._scheduler.run_deferred()
        self._plan_seconds += self._clock() - launched
        return True

    def _apply_oldest(self) -> None:
        plan, pending, launched_at = self._launched[0]
        self._scheduler.prepare_outcome()
        wait_began = self._clock()
        result = pending.wait()
        self._launched.popleft()
        now = self._clock()
        self._waited_s += now - wait_began
        outcome = self._scheduler.confirm(plan.step_no, result.drawn())
        confirmed = self._clock()
        finished = self._outbox.send_step(outcome, result, now)
        sent = self._clock()
        self._scheduler.run_deferred()
        self._plan_seconds += confirmed - now + self._clock() - sent
        self._note_step(plan, launched_at, now)
        for finish in finished:
            if finish.output_tokens:
                self._rates.on_ended(finish.total_s - finish.queued_s)
        if now - self._stats_at >= STATS_EVERY_S:  # After the tokens, which clients wait for.
            self._report(now)
        if plan.step_no % CHECK_POOL_EVERY == 0:
            self._scheduler.pool.check_sums()

    def _note_step(self, plan: StepPlan, launched_at: float, now: float) -> None:
        # Steps overlap: a step occupies the device only after the previous one has ended.
        self._rates.on_step(plan.num_tokens, now - max(launched_at, self._applied_at))
        self._applied_at = now
        self._step_seconds += now - launched_at
        self._step_no = plan.step_no

    def _wait_timeout(self) -> float | None:
        """Timeout for the next wait for messages: 0 with work in progress, None (no limit) when idle."""
        if self._launched or self._progressed:
            return 0.0
        if self._scheduler.has_work:
            return BLOCKED_WAIT_S
        if not self._runner.is_warm:
            self._runner.warm_next()
            return 0.0
        return self._idle()

    def _idle(self) -> float | None:
        """Timeout when there is nothing to do: poll briefly, report, wait for a while, release memory, then block."""
        if self._idle_since is None:
            self._idle_since = self._clock()
            self._poll_s = self._device.poll_s
            if self._poll_s > 0:
                return self._poll_s
        if not self._reported_idle:
            self._reported_idle = True
            self._report(self._clock())
            self.on_idle()
        if self._clock() - self._idle_since < idle_memory.IDLE_S:
            return idle_memory.IDLE_S
        idle_memory.trim_heap()
        return None

    def _handle(self, message: ToEngine) -> None:
        if isinstance(message, NewRequest):
            request = _to_request(message)
            self._ledger.open(message, request, self._clock())
            self._rates.on_arrival(request.priority)
            self._scheduler.submit(request)
        elif isinstance(message, Abort):
            for request_id in message.ids:
                self._scheduler.abort(request_id, message.reason)
        elif isinstance(message, Stop):
            self._stopping = True
        else:
            self._handle_rare(message)

    def _handle_rare(self, message: AbortFront | Hello | Query) -> None:
        if isinstance(message, AbortFront):
            for request_id in self._ledger.of_front(message.front):
                self._scheduler.abort(request_id)
        elif isinstance(message, Hello):
            if self.ready is not None:
                self._channel.send(message.front, self.ready)
        else:
            self._channel.send(message.front, Reply(message.query_id, self._answer(message)))

    def _answer(self, query: Query) -> bytes:
        entries = self._ledger.named(query.name, query.tenant)
        if not entries:
            return b""
        if query.kind == "explain":
            # A client may reuse a name: explain the latest request that has it.
            latest = [entry for entry in entries if entry.names == entries[-1].names]
            return msgspec.json.encode(explain(latest, self._clock()))
        open_ids = [entry.request_id for entry in entries if entry.finish is None]
        for request_id in open_ids:
            self._scheduler.abort(request_id, "cancelled", "The request was cancelled.")
        return msgspec.json.encode(
            {"object": "request.cancelled", "id": query.name, "cancelled": bool(open_ids), "sequences": len(open_ids)}
        )

    def _launch(self, plan: StepPlan, now: float) -> None:
        self._launched.append((plan, self._runner.launch(plan), now))
        for admission in plan.admitted:
            self._ledger.on_admitted(admission.request_id, now)
        self._rates.on_admitted(len(plan.admitted))

    # -- when a step fails -----------------------------------------------------------------------------------------

    def _recover(self, error: Exception) -> None:
        """Discard the steps in flight and run their rows again in halves, until a single row fails."""
        log.error("a step failed; searching for the request that caused it", exc_info=error)
        self._discard_launched()
        self._device.probe()
        if self._scheduler.num_in_flight == 0:
            raise error  # No request caused this: the engine itself is broken.
        suspects = list(self._scheduler.discard_in_flight())
        while suspects:
            half = suspects[: max(1, len(suspects) // 2)]
            failure = self._try_rows(half)
            if failure is None:
                suspects = suspects[len(half) :]
            elif len(half) == 1:
                self._fail_row(half[0], failure)
                return
            else:
                suspects = half

    def _discard_launched(self) -> None:
        while self._launched:
            _, pending, _ = self._launched.popleft()
            try:
                pending.wait()
            except Exception:
                log.debug("a later step failed too", exc_info=True)

    def _try_rows(self, rows: list[int]) -> Exception | None:
        """Run one step with only these rows. Returns the error if it fails."""
        now = self._clock()
        plan = self._scheduler.plan(now, only=rows)
        if ended := self._scheduler.take_ended():
            self._outbox.send_ended(self._step_no, ended, now)
        if plan is None:
            return None
        try:
            self._launch(plan, now)
            self._apply_oldest()
        except Exception as error:
            self._discard_launched()
            self._device.probe()
            self._scheduler.discard_in_flight()
            return error
        return None

    def _fail_row(self, row: int, error: Exception) -> None:
        request_id = int(self._scheduler.rows.request_ids[row])
        entry = self._ledger.entry(request_id)
        log.error(
            "request %s caused the failure and ends with an error", " ".join(entry.names) if entry else request_id
        )
        self._scheduler.abort(request_id, "error", f"The step that computed this request failed: {error}")
        self._outbox.send_ended(self._step_no, self._scheduler.take_ended(), self._clock())

    # -- statistics ------------------------------------------------------------------------------------------------

    def _report(self, now: float) -> None:
        self._stats_at = now
        self._outbox.send_stats(self._step_no, self._stats())

    def _stats(self) -> EngineStats:
        scheduler, pool, rates = self._scheduler, self._scheduler.pool, self._rates
        rates.sample(self._stats_at)
        rows_free = scheduler.rows.num_free
        return EngineStats(
            step_no=self._step_no,
            running=scheduler.num_running,
            waiting=len(scheduler.waiting),
            blocks_total=pool.total,
            blocks_free=pool.num_free,
            blocks_cached=pool.num_cached,
            prefix_hit_tokens=scheduler.prefix.hit_tokens,
            prefix_query_tokens=scheduler.prefix.query_tokens,
            preemptions=scheduler.num_preemptions,
            prompt_tokens=self._ledger.prompt_tokens,
            output_tokens=self._ledger.output_tokens,
            step_seconds=self._step_seconds,
            plan_seconds=self._plan_seconds,
            host_seconds=self._host_seconds,
            graphs_left=self._runner.num_cold,
            waiting_by_class=tuple(scheduler.waiting.num_by_class),
            waiting_tokens=tuple(scheduler.waiting.tokens_by_class),
            aged_by_class=scheduler.waiting.num_aged(self._stats_at),
            rows_free=rows_free,
            admissions_per_s=rates.admissions_per_s(
                scheduler.num_running + (0 if len(scheduler.waiting) else rows_free)
            ),
            arrivals_per_s=rates.arrivals_per_s(),
            tokens_per_s=rates.tokens_per_s,
        )


def _to_request(message: NewRequest) -> Request:
    params = message.params
    if params.max_tokens is None:
        raise AssertionError("the front must fill in max_tokens")
    return Request(
        id=message.id,
        prompt=unpack_tokens(message.prompt),
        max_tokens=params.max_tokens,
        end_token_ids=message.end_token_ids,
        min_tokens=params.min_tokens,
        priority=min(max(message.priority, INTERACTIVE), BATCH),
        tenant=message.tenant,
        weight=message.weight,
        arrival=message.arrival,
        deadline=message.deadline if message.deadline is not None else float("inf"),
        salt=message.cache_salt.encode(),
        read_cache=params.prompt_logprobs is None,
        row_params=RowParams(params, message.end_token_ids),
    )
