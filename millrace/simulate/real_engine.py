"""The real engine in the simulator's place: the same driver with a real runner, on the real clock."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from millrace.config import Config
from millrace.engine.build import build_runner
from millrace.engine.cycle import Confirmed
from millrace.observe.slo.objective import Objective
from millrace.plan.shapes.choice import ShapeChoice
from millrace.run.facts import RunnerFacts
from millrace.simulate.group import report_of
from millrace.simulate.replica import Replica
from millrace.simulate.requests import SimulatedRequest
from millrace.simulate.simulation import Simulated, collect


class RealEngine:
    """A loaded model that is warm. Every run has a scheduler of its own, with an empty cache; compiled kernels and
    graphs stay."""

    def __init__(self, config: Config, change: Callable[[RunnerFacts], RunnerFacts] = lambda facts: facts) -> None:
        """`change`: of what the runner declares, to run without one of its abilities."""
        self.decided, self._runner = build_runner(config)
        self.facts = change(self._runner.facts)
        self._shapes = ShapeChoice(self.facts.shapes)
        """Knows which shapes have a graph."""
        warming = self.replica()
        while warming.warm_next():
            pass

    def close(self) -> None:
        self.decided.device.close()

    def replica(self, on_step: Callable[[Confirmed], None] = lambda done: None) -> Replica:
        """Its clock starts at 0 now."""
        began = time.monotonic()
        return Replica(
            self.decided.scheduler,
            self._runner,
            self.facts,
            clock=lambda: time.monotonic() - began,
            sleep=time.sleep,
            shapes=self._shapes,
            max_context=self.decided.plan.max_context,
            on_step=on_step,
            vocab_size=self.decided.spec.vocab_size,
        )

    def run(self, requests: Sequence[SimulatedRequest], objectives: tuple[Objective, ...] = ()) -> Simulated:
        """In real time."""
        replica = self.replica()
        for number, request in enumerate(requests):
            replica.run_until(request.at_s)
            time.sleep(max(0.0, request.at_s - replica.now))
            replica.submit(number, request)
        replica.run_until(float("inf"))
        return collect([report_of(replica)], objectives)
