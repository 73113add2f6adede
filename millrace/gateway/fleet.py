"""The replicas of a gateway and the choice among them."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Collection, Mapping

from millrace.errors import ConfigError, EngineUnavailable
from millrace.gateway.replica import MIN_TOKEN_SAMPLES, OpenAttempt, Replica
from millrace.gateway.rollout.canary import Rollout
from millrace.gateway.routing.candidates import Asked, Candidate, Moment
from millrace.gateway.routing.decisions import Decision, DecisionLog, RequestRecord
from millrace.gateway.routing.health import HealthLimits, slow_outliers
from millrace.gateway.routing.policies import policy_named
from millrace.gateway.routing.prefix_map import PrefixMap
from millrace.gateway.settings import GatewaySettings, ReplicaSettings, replica_name, without_credentials

SILENT_S = 30.0
"""Streams of Millrace replicas send a sign of life every 10 s at least."""


class NoReplica(EngineUnavailable):
    """No replica can take the request now."""


class Fleet:
    def __init__(self, settings: GatewaySettings, clock: Callable[[], float] = time.monotonic) -> None:
        self.settings = settings
        self.clock = clock
        self.policy = policy_named(settings.policy)
        self.prefixes = PrefixMap()
        self.decisions = DecisionLog(settings.decision_log)
        self.replicas: dict[str, Replica] = {}
        self.rollout: Rollout | None = None
        self.shadow_group = ""
        """Its replicas get copies of requests, and nothing else."""
        self._limits = HealthLimits(settings.max_failures, settings.eject_s, settings.ramp_s)
        self._turn = 0
        self._random = random.Random()

    # ── members ───────────────────────────────────────────────────────────────────────────────────────────────────────
    def add(self, settings: ReplicaSettings, source: str = "") -> Replica:
        """`source`: who may remove it again."""
        name = replica_name(settings)
        if name in self.replicas:
            raise ConfigError(f"There are two replicas {name!r}; give each a 'name' of its own.", param="replicas")
        replica = self.replicas[name] = Replica(settings, self._limits, source=source)
        return replica

    def remove(self, name: str) -> Replica:
        self.prefixes.forget(name)
        return self.replicas.pop(name)

    def open_replicas(self) -> list[Replica]:
        now = self.clock()
        return [one for one in self.replicas.values() if one.is_open(now, self.settings.max_open)]

    # ── choosing ──────────────────────────────────────────────────────────────────────────────────────────────────────
    def choose(
        self, asked: Asked, record: RequestRecord, *, excluded: Collection[str] = (), cause: str = "new"
    ) -> tuple[Replica, OpenAttempt]:
        """A replica for the request, and the attempt that is now open there."""
        able = self._able(asked, excluded)
        now = self.clock()
        held = self._held_elsewhere(asked, able, excluded)
        candidates = tuple(
            Candidate(
                name=one.name,
                weight=one.settings.weight * one.health.share(now),
                outstanding_tokens=one.outstanding_tokens,
                num_open=len(one.attempts),
                matched_tokens=(
                    matched := min(asked.prompt_tokens, self.prefixes.matched_tokens(one.name, asked.chain))
                ),
                has_model=one.models.is_loaded(asked.model),
                region=one.settings.region,
                tokens_per_s=one.load.tokens_per_s,
                fetch_tokens=self._worth_fetching(one, held, matched),
                fetch_tokens_per_s=one.fetch_tokens_per_s,
            )
            for one in able
        )
        moment = Moment(self._turn, self._random.random(), self.settings.region)
        self._turn += 1
        choice = self.policy.choose(asked, candidates, moment)
        matched = next(one.matched_tokens for one in candidates if one.name == choice.replica)
        kv_from = self.kv_source(asked, choice.replica, matched, excluded)
        decision = Decision(
            time.time(), self.settings.policy, asked, moment, candidates, choice, len(record.decisions), cause, kv_from
        )
        self.decisions.decided(record, decision)
        attempt = OpenAttempt(asked, asked.prompt_tokens - matched + asked.output_tokens)
        attempt.kv_from = without_credentials(self.replicas[kv_from].settings.url) if kv_from else ""
        replica = self.replicas[choice.replica]
        replica.add(attempt)
        self.prefixes.sent_to(replica.name, asked.chain)
        return replica, attempt

    def _held_elsewhere(self, asked: Asked, able: list[Replica], excluded: Collection[str]) -> dict[str, int]:
        """By replica, the prompt's tokens that others could fetch from it; empty while none has fetched well."""
        if not self.settings.kv_fetch_tokens or not any(one.fetch_tokens_per_s for one in able):
            return {}
        return {
            one.name: min(asked.prompt_tokens, self.prefixes.surely_on_device(one.name, asked.chain))
            for one in self._givers(asked, excluded)
        }

    def _worth_fetching(self, replica: Replica, held: Mapping[str, int], matched: int) -> int:
        if not replica.is_millrace or not replica.fetch_tokens_per_s:
            return 0
        more = max((count for name, count in held.items() if name != replica.name), default=0) - matched
        return more if more >= self.settings.kv_fetch_tokens else 0

    def _givers(self, asked: Asked, excluded: Collection[str]) -> list[Replica]:
        """Replicas that others can fetch blocks from. One that drains gives them, too."""
        now = self.clock()
        return [
            one
            for one in self.replicas.values()
            if one.name not in excluded and one.is_millrace and one.health.share(now) and one.takes(asked.model)
        ]

    def kv_source(self, asked: Asked, chosen: str, matched: int, excluded: Collection[str]) -> str:
        """The replica with the most of the prompt in its cache, if that is enough more."""
        if not self.settings.kv_fetch_tokens or not self.replicas[chosen].is_millrace:
            return ""
        best, name = matched + self.settings.kv_fetch_tokens - 1, ""
        for one in self._givers(asked, excluded):
            found = min(asked.prompt_tokens, self.prefixes.matched_tokens(one.name, asked.chain))
            if found > best and one.name != chosen:
                best, name = found, one.name
        return name

    def _able(self, asked: Asked, excluded: Collection[str]) -> list[Replica]:
        open_now = [
            one
            for one in self.open_replicas()
            if one.name not in excluded and (not self.shadow_group or one.settings.group != self.shadow_group)
        ]
        if not open_now:
            raise NoReplica(self._why_none(excluded))
        able = [one for one in open_now if one.takes(asked.model)] or open_now
        if self.rollout is not None:
            able = self.rollout.chosen(able, lambda one: one.settings.group, asked.session or asked.id)
        apart = [one for one in able if one.settings.long_jobs == asked.is_long]
        return apart or able

    def _why_none(self, excluded: Collection[str]) -> str:
        if not self.replicas:
            return "This gateway has no replicas; add one with --replicas, or POST /v1/fleet/replicas."
        states = [
            f"{one.name} {'was tried' if one.name in excluded else _state_of(one, self.shadow_group)}"
            for one in self.replicas.values()
        ]
        return f"No replica can take this request: {'; '.join(states)}."

    # ── outliers ──────────────────────────────────────────────────────────────────────────────────────────────────────
    def eject_slow(self) -> list[Replica]:
        """Eject replicas that are much slower than the others. Their streams go on: they are slow, not lost."""
        if not self.settings.outlier_factor:
            return []
        now = self.clock()
        known = {
            name: one.token_ms
            for name, one in self.replicas.items()
            if one.num_token_samples >= MIN_TOKEN_SAMPLES and one.health.share(now) > 0
        }
        ejected = []
        for name in slow_outliers(known, self.settings.outlier_factor):
            replica = self.replicas[name]
            if replica.health.eject(now, f"{replica.token_ms:.0f} ms per token, far above the others"):
                replica.num_token_samples, replica.token_ms = 0, 0.0  # Measured anew when it returns.
                ejected.append(replica)
        return ejected

    def give_up_silent(self) -> None:
        """Move streams that have sent nothing for long, while others of their replica may go on."""
        now, limit_s = self.clock(), max(self.settings.stall_s, SILENT_S)
        for replica in self.replicas.values():
            for attempt in replica.silent(now, limit_s):
                attempt.give_up(f"nothing came for {limit_s:g} s")
                replica.health.failed(now, f"a stream sent nothing for {limit_s:g} s")

    def find_stalled(self) -> list[Replica]:
        """Replicas whose begun streams all stand still."""
        now, found = self.clock(), []
        for replica in self.replicas.values():
            last = replica.stalled_since()
            if last is not None and now - last > self.settings.stall_s:
                found.append(replica)
        return found


def _state_of(replica: Replica, shadow_group: str) -> str:
    if shadow_group and replica.settings.group == shadow_group:
        return "gets copies only"
    if replica.is_draining or replica.load.draining:
        return "drains"
    if replica.health.state in ("starting", "ejected"):
        return f"is {replica.health.state} ({replica.health.reason})"
    return "is full"
