"""Canary rollouts that grow or return by themselves, and shadow traffic that no client notices."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from helpers.gateways import gateway_over
from helpers.waiting import until

from millrace.bench.gateway.null_replica import MODEL, NullReplica
from millrace.errors import BadRequest
from millrace.gateway.rollout.canary import Rollout, RolloutSettings, place_of
from millrace.gateway.settings import ReplicaSettings

pytestmark = pytest.mark.live

BOTH = ["old", "new"]


def canary(**settings: Any) -> Rollout:
    return Rollout(RolloutSettings("new", **{"steps": (0.25, 1.0), "step_s": 10.0, "min_requests": 4, **settings}), 0.0)


def side_of(rollout: Rollout, who: str) -> str:
    (one,) = rollout.chosen(BOTH, str, who)
    return one


def test_share_of_the_sessions_and_always_the_same_ones() -> None:
    rollout = canary()
    sides = {f"s{number}": side_of(rollout, f"s{number}") for number in range(1000)}
    new = {who for who, side in sides.items() if side == "new"}
    assert 180 < len(new) < 320
    assert new == {who for who in sides if place_of(who) < 0.25}
    assert rollout.chosen(["old"], str, next(iter(new))) == ["old"], "the other side if its own has nobody"


def test_it_grows_only_after_time_and_requests() -> None:
    rollout = canary()
    assert rollout.check(100.0) == "", "nobody was answered"
    for _ in range(4):
        rollout.answered("new", 0.1)
    assert rollout.check(5.0) == "", "too early"
    assert rollout.check(10.0) == "group 'new' gets 100% of the requests"
    assert rollout.check(30.0) == "", "a step counts its own requests"
    for _ in range(4):
        rollout.answered("new", 0.1)
    assert rollout.check(30.0).endswith("has its last share, 100%")
    assert (rollout.state, rollout.share) == ("complete", 1.0)


def test_failures_return_it_also_after_its_last_step() -> None:
    rollout = canary(steps=(1.0,), step_s=0.0)
    for _ in range(20):
        rollout.answered("old", 0.1)
        rollout.answered("new", 0.1)
    rollout.check(1.0)
    assert rollout.state == "complete"
    rollout.failed("new")
    rollout.failed("new")
    assert rollout.check(2.0) == "", "two failures say nothing"
    rollout.failed("new")
    assert "3 of 23 requests failed, 0.0% elsewhere" in rollout.check(3.0)
    assert (rollout.state, rollout.share, side_of(rollout, "any")) == ("returned", 0.0, "old")


def test_failures_everywhere_are_not_its_fault() -> None:
    rollout = canary()
    for _ in range(10):
        rollout.failed("new")
        rollout.failed("old")
    assert rollout.check(1.0) == ""


@pytest.mark.parametrize(("new_s", "expected"), [(0.1, "running"), (0.16, "returned")])
def test_slowness_returns_it(new_s: float, expected: str) -> None:
    rollout = canary()
    for _ in range(4):
        rollout.answered("old", 0.1)
        rollout.answered("new", new_s)
    rollout.check(1.0)
    assert rollout.state == expected


@pytest.mark.parametrize("settings", [{"group": ""}, {"steps": ()}, {"steps": (2.0,)}, {"max_slower": 1.0}])
def test_wrong_settings_are_named(settings: dict[str, Any]) -> None:
    with pytest.raises(BadRequest, match="The rollout is wrong"):
        RolloutSettings(**{"group": "new", **settings})


def test_canary_that_fails_costs_no_client_an_error_and_returns() -> None:
    async def check() -> None:
        old, new = NullReplica(), NullReplica(status=503)
        async with old.running() as old_url, new.running() as new_url:
            members = ReplicaSettings(old_url, "old"), ReplicaSettings(new_url, "new", group="canary")
            async with gateway_over(*members, policy="round-robin", max_failures=1000) as gateway:
                settings = {"group": "canary", "steps": [0.5, 1.0], "step_s": 0, "min_requests": 5}
                assert (await gateway.post("/v1/fleet/rollout", {**settings, "group": "nobody"}))[0] == 400
                assert (await gateway.post("/v1/fleet/rollout", settings))[0] == 201
                statuses = [(await gateway.complete(f"{number}"))[0] for number in range(30)]
                assert set(statuses) == {200}
                rollout = gateway.state.fleet.rollout
                assert rollout is not None
                await until(lambda: rollout.state == "returned")
                tried = new.num_requests
                await asyncio.gather(*(gateway.complete(f"later {number}") for number in range(20)))
                assert new.num_requests == tried
                shown = (await gateway.get("/v1/fleet/rollout"))[1]
                assert (shown["state"], shown["share"]) == ("returned", 0.0)
                assert (await gateway.session.delete(gateway.url + "/v1/fleet/rollout")).status == 200
                assert (await gateway.get("/v1/fleet/rollout"))[0] == 404

    asyncio.run(check())


def test_good_canary_gets_everything() -> None:
    async def check() -> None:
        old, new = NullReplica(), NullReplica()
        async with old.running() as old_url, new.running() as new_url:
            members = ReplicaSettings(old_url, "old"), ReplicaSettings(new_url, "new", group="canary")
            async with gateway_over(*members) as gateway:
                settings = {"group": "canary", "steps": [0.5, 1.0], "step_s": 0, "min_requests": 3, "max_slower": 1000}
                await gateway.post("/v1/fleet/rollout", settings)
                rollout = gateway.state.fleet.rollout
                assert rollout is not None
                number = 0
                async with asyncio.timeout(60):
                    while rollout.state != "complete":
                        number += 1
                        await gateway.complete(f"{number}")
                before = old.num_requests
                await asyncio.gather(*(gateway.complete(f"later {number}") for number in range(20)))
                assert (old.num_requests, rollout.share) == (before, 1.0)

    asyncio.run(check())


def test_shadow_gets_copies_and_answers_nobody() -> None:
    async def check() -> None:
        old, shadow = NullReplica(), NullReplica()
        async with old.running() as old_url, shadow.running() as shadow_url:
            members = ReplicaSettings(old_url, "old"), ReplicaSettings(shadow_url, "new", group="next")
            async with gateway_over(*members, policy="round-robin") as gateway:
                assert (await gateway.post("/v1/fleet/shadow", {"group": "next"}))[0] == 201
                for number in range(3):
                    assert (await gateway.complete(f"{number}"))[0] == 200
                seen = await gateway.stream("streamed", max_tokens=4)
                assert seen.headers["X-Millrace-Replica"] == "old"
                running = gateway.state.shadow
                assert running is not None
                await until(lambda: shadow.num_requests == 4 and running.num_compared == 3)
                assert old.num_requests == 4
                assert [body["stream"] for body in shadow.bodies] == [False] * 4
                shown = (await gateway.get("/v1/fleet"))[1]["shadow"]
                assert (shown["sent"], shown["failed"], shown["same_text"]) == (4, 0, 3)
                shadow.status = 500
                assert (await gateway.complete("again"))[0] == 200
                await until(lambda: running.num_failed == 1)
                await gateway.session.delete(gateway.url + "/v1/fleet/shadow")
                shadow.status = 0
                await asyncio.gather(*(gateway.complete(f"b{number}", model=MODEL) for number in range(4)))
                assert old.num_requests < 9, "the group is like the others again"

    asyncio.run(check())
