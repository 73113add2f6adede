"""Ejection, slow return and outliers, with time as an argument."""

from __future__ import annotations

import pytest

from millrace.gateway.fleet import Fleet
from millrace.gateway.replica import OpenAttempt
from millrace.gateway.routing.candidates import Asked
from millrace.gateway.routing.health import FIRST_SHARE, Health, HealthLimits, slow_outliers
from millrace.gateway.settings import GatewaySettings, ReplicaSettings

LIMITS = HealthLimits(max_failures=3, eject_s=5.0, ramp_s=10.0)


def healthy() -> Health:
    health = Health(LIMITS)
    assert health.share(0.0) == 0.0, "nothing before the first answer"
    health.succeeded(0.0)
    return health


def test_failures_in_a_row_eject() -> None:
    health = healthy()
    for _ in range(5):
        assert not health.failed(1.0, "x")
        assert not health.failed(1.0, "x")
        health.succeeded(1.0)
    assert [health.failed(2.0, "refused") for _ in range(3)] == [False, False, True]
    assert (health.share(2.0), health.reason) == (0.0, "refused")


def test_return_is_slow() -> None:
    health = healthy()
    health.eject(10.0, "x")
    health.succeeded(12.0)
    assert health.share(12.0) == 0.0, "not before its time"
    health.succeeded(15.0)
    assert health.share(15.0) == FIRST_SHARE
    assert health.share(20.0) == 0.5
    health.succeeded(25.0)
    assert health.state == "healthy"


def test_failure_while_returning_ejects_for_longer() -> None:
    health = healthy()
    health.eject(0.0, "x")
    health.succeeded(5.0)
    assert health.failed(6.0, "again")
    health.succeeded(15.0)
    assert health.state == "ejected", "twice as long as before"
    health.succeeded(16.0)
    assert health.state == "returning"


def test_only_a_minority_is_slow() -> None:
    assert slow_outliers({"a": 10, "b": 11, "c": 90}, 5) == ["c"]
    assert slow_outliers({"a": 10, "b": 90}, 5) == [], "of two, none is the outlier"
    assert slow_outliers({"a": 10, "b": 90, "c": 95}, 5) == []
    assert slow_outliers({}, 5) == []
    assert slow_outliers({"a": 0.1, "b": 0.1, "c": 5}, 5) == [], "5 ms per token is slow to nobody"


def fleet_with_open_streams() -> tuple[Fleet, list[float]]:
    now = [100.0]
    fleet = Fleet(GatewaySettings(stall_s=30.0), clock=lambda: now[0])
    for name in "abc":
        replica = fleet.add(ReplicaSettings(f"http://{name}:1", name=name))
        replica.health.succeeded(now[0])
        replica.add(OpenAttempt(Asked("id", "m", 1, 1), 2))
    return fleet, now


def test_streams_that_stand_still_are_found() -> None:
    fleet, now = fleet_with_open_streams()
    now[0] = 500.0
    assert fleet.find_stalled() == [], "a long prefill is no stall"
    for replica in fleet.replicas.values():
        replica.saw_frame(next(iter(replica.attempts)), now[0])
    now[0] = 520.0
    other = fleet.replicas["b"]
    other.saw_frame(next(iter(other.attempts)), now[0])
    now[0] = 540.0
    assert [one.name for one in fleet.find_stalled()] == ["a", "c"]


def test_a_stream_that_sends_nothing_is_given_up_alone() -> None:
    fleet, now = fleet_with_open_streams()
    for name, replica in fleet.replicas.items():
        (attempt,) = replica.attempts
        if name != "a":  # Has no head yet.
            attempt.heard_at = now[0]
        attempt.is_held = name == "b"
    lively = OpenAttempt(Asked("id", "m", 1, 1), 2)
    fleet.replicas["c"].add(lively)
    now[0] += 31.0
    lively.heard_at = now[0]
    fleet.give_up_silent()
    given_up = {name: [one.aborted for one in replica.attempts] for name, replica in fleet.replicas.items()}
    assert (given_up["a"], given_up["b"], sorted(given_up["c"])) == ([""], [""], ["", "nothing came for 30 s"])


def test_a_slow_client_is_no_stall_and_no_slow_replica() -> None:
    fleet, now = fleet_with_open_streams()
    replica = fleet.replicas["a"]
    (attempt,) = replica.attempts
    replica.saw_frame(attempt, now[0])
    attempt.is_held = True
    now[0] += 100.0
    assert fleet.find_stalled() == []
    attempt.released(now[0])
    assert fleet.find_stalled() == []
    replica.saw_frame(attempt, now[0] + 0.01)
    assert replica.token_ms == pytest.approx(10.0)


def test_slow_replica_is_ejected_and_measured_anew() -> None:
    fleet, now = fleet_with_open_streams()
    for _ in range(40):
        for name, replica in fleet.replicas.items():
            attempt = next(iter(replica.attempts))
            attempt.last_frame_at, attempt.num_frames = 0.0, 1
            replica.saw_frame(attempt, 0.5 if name == "c" else 0.01)
    assert [one.name for one in fleet.eject_slow()] == ["c"]
    assert fleet.replicas["c"].health.share(now[0]) == 0.0
    assert fleet.replicas["c"].num_token_samples == 0
    assert fleet.eject_slow() == []
