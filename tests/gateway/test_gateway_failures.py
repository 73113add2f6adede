"""Replicas that fail under a gateway: clients get their answers, each token once."""

from __future__ import annotations

import asyncio

import pytest
from helpers.gateways import gateway_over
from helpers.waiting import until

from millrace.bench.gateway.null_replica import MODEL, NullReplica, answer_text

pytestmark = pytest.mark.live


def test_retry_before_the_first_token() -> None:
    async def check() -> None:
        broken, well = NullReplica(status=503), NullReplica()
        async with gateway_over(broken, well, policy="round-robin", max_failures=1000) as gateway:
            for number in range(6):
                assert (await gateway.complete(f"{number}"))[0] == 200
                seen = await gateway.stream(f"{number}", max_tokens=4)
                assert seen.text == answer_text(f"{number}", 4)
            assert broken.num_requests > 0
            _, page = await gateway.get("/metrics")
            assert 'cause="retry",replica="r1"' in page

    asyncio.run(check())


@pytest.mark.parametrize("after", [0, 1, 7])
def test_stream_goes_on_at_another_replica(after: int) -> None:
    async def check() -> None:
        dying, well = NullReplica(die_after=after, token_ms=20), NullReplica()
        async with gateway_over(dying, well, policy="round-robin") as gateway:
            for number in range(4):
                seen = await gateway.stream(f"{number}", max_tokens=20, headers={"X-Request-Id": f"id{number}"})
                assert seen.text == answer_text(f"{number}", 20)
                assert (seen.is_done, seen.errors, len(seen.ids)) == (True, [], 1)
            assert dying.num_requests > 0
            status, told = await gateway.get("/v1/requests/id0/explain")
            assert status == 200
            causes = [[one["cause"] for one in told["gateway"]["decisions"]]]
            causes.append([one.cause for one in gateway.state.fleet.decisions.find("id1").decisions])
            assert ["new", "resume" if after else "retry"] in causes

    asyncio.run(check())


def test_hanging_replica_is_lost_by_its_lack_of_progress() -> None:
    async def check() -> None:
        hanging, well = NullReplica(hang_after=5), NullReplica()
        async with gateway_over(hanging, well, policy="round-robin", stall_s=0.5) as gateway:
            seen = await asyncio.gather(*(gateway.stream(f"{number}", max_tokens=20) for number in range(4)))
            assert [one.text for one in seen] == [answer_text(f"{number}", 20) for number in range(4)]
            assert hanging.num_requests > 0
            assert gateway.state.fleet.replicas["r0"].health.num_ejections > 0

    asyncio.run(check())


def test_stream_without_ids_ends_with_an_error() -> None:
    """An old replica marks no tokens: better an error than a wrong token."""

    async def check() -> None:
        dying, well = NullReplica(die_after=5, sends_ids=False, token_ms=20), NullReplica()
        async with gateway_over(dying, well, policy="round-robin") as gateway:
            seen = [await gateway.stream(f"{number}", max_tokens=20) for number in range(2)]
            broken = next(one for one in seen if one.errors)
            assert broken.errors[0]["code"] == "engine_unavailable"
            assert not broken.is_done

    asyncio.run(check())


def test_draining_replica_gets_nothing_new_and_loses_nothing() -> None:
    async def check() -> None:
        leaving, staying = NullReplica(token_ms=2), NullReplica(token_ms=2)
        async with gateway_over(leaving, staying, policy="round-robin") as gateway:
            running = [asyncio.create_task(gateway.stream(f"{number}", max_tokens=100)) for number in range(4)]
            await until(lambda: leaving.num_open == 2)
            status, _ = await gateway.post("/v1/fleet/replicas/r0/drain", {})
            assert status == 200
            before = leaving.num_requests
            for number in range(4):
                assert (await gateway.complete(f"new {number}", max_tokens=1))[0] == 200
            assert leaving.num_requests == before
            assert (await gateway.post("/v1/fleet/replicas/r1/drain", {}))[0] == 409, "the last one"
            await gateway.post("/v1/fleet/replicas/r0/return", {})
            await gateway.post("/v1/fleet/replicas/r0/drain?move=1", {})
            seen = await asyncio.gather(*running)
            assert [one.text for one in seen] == [answer_text(f"{number}", 100) for number in range(4)]
            assert sum(one.errors != [] for one in seen) == 0

    asyncio.run(check())


def test_rolling_restart_without_an_error() -> None:
    """Each replica in turn drains, goes away and comes back while requests keep coming."""

    async def check() -> None:
        replicas = [NullReplica(token_ms=1) for _ in range(3)]
        async with gateway_over(*replicas, policy="least-tokens") as gateway:
            is_over, seen = asyncio.Event(), []

            async def client(number: int) -> None:
                count = 0
                while not is_over.is_set():
                    count += 1
                    prompt = f"{number} {count}"
                    seen.append((prompt, await gateway.stream(prompt, max_tokens=30)))

            clients = [asyncio.create_task(client(number)) for number in range(6)]
            for number, replica in enumerate(replicas):
                replica.is_draining = True
                await until(lambda replica=replica: replica.num_open == 0)
                replica.is_draining = False
                done = len(seen)
                await until(lambda number=number: not gateway.state.fleet.replicas[f"r{number}"].load.draining)
                await until(lambda done=done: len(seen) > done + 6)
            is_over.set()
            await asyncio.gather(*clients)
            assert all(one.text == answer_text(prompt, 30) and not one.errors for prompt, one in seen)

    asyncio.run(check())


def test_hedge_takes_the_first_answer() -> None:
    async def check() -> None:
        slow, quick = NullReplica(prefill_us=1e9), NullReplica()
        async with gateway_over(slow, quick, policy="round-robin", hedge_ms=20) as gateway:
            for number in range(4):
                assert (await gateway.stream(f"{number}", max_tokens=3)).text == answer_text(f"{number}", 3)
                assert (await gateway.complete(f"{number}", max_tokens=3))[0] == 200
            await until(lambda: slow.num_open == 0)
            assert slow.num_cancelled > 0, "the slower request is given up"
            assert not any(one.attempts for one in gateway.state.fleet.replicas.values())

    asyncio.run(check())


def test_a_replica_that_never_begins_to_answer_is_given_up() -> None:
    async def check() -> None:
        mute, well = NullReplica(prefill_us=1e9), NullReplica()
        async with gateway_over(mute, well, policy="round-robin", head_s=0.2, answer_s=0.2) as gateway:
            for number in range(2):
                assert (await gateway.stream(f"{number}", max_tokens=3)).text == answer_text(f"{number}", 3)
                assert (await gateway.complete(f"{number}", max_tokens=3))[0] == 200
            notes = [note for one in gateway.state.fleet.decisions.recent(9) for note in one.notes]
            assert "r0: it did not begin to answer within 0.2 s" in notes
            await until(lambda: mute.num_open == 0)

    asyncio.run(check())


def test_circuit_opens_and_closes_slowly() -> None:
    async def check() -> None:
        sick, well = NullReplica(status=502), NullReplica()
        async with gateway_over(sick, well, policy="round-robin", eject_s=0.5) as gateway:
            health = gateway.state.fleet.replicas["r0"].health
            for number in range(12):
                assert (await gateway.complete(f"{number}"))[0] == 200
                if health.state == "ejected":
                    break
            assert health.state == "ejected"
            seen = sick.num_requests
            await gateway.complete("other")
            assert sick.num_requests == seen
            sick.status = 0
            await until(lambda: health.state == "healthy")

    asyncio.run(check())


def test_poison_request_tries_few_replicas() -> None:
    async def check() -> None:
        replicas = [NullReplica(die_after=0) for _ in range(5)]
        async with gateway_over(*replicas, policy="round-robin", max_attempts=3) as gateway:
            body = {"model": MODEL, "prompt": "x", "stream": True}
            status, answer = await gateway.post("/v1/completions", body)
            assert (status, answer["error"]["code"]) == (503, "engine_unavailable")
            assert sum(one.num_requests for one in replicas) <= 3

    asyncio.run(check())


def test_stampede_computes_its_prefix_once() -> None:
    async def check() -> None:
        replicas = [NullReplica(prefill_us=50) for _ in range(3)]
        async with gateway_over(*replicas, policy="prefix") as gateway:
            prompt = "long " * 2000
            seen = await asyncio.gather(*(gateway.stream(prompt, max_tokens=4) for _ in range(16)))
            assert all(one.text == answer_text(prompt, 4) for one in seen)
            assert sum(one.num_computed for one in replicas) < 1.1 * len(prompt) / 4

    asyncio.run(check())


def test_evicted_prefix_is_known_to_be_gone() -> None:
    """After evictions the events decide, not the memory of what was sent."""

    async def check() -> None:
        small, other = NullReplica(max_blocks=40), NullReplica(max_blocks=40)
        async with gateway_over(small, other, policy="prefix") as gateway:
            fleet, prompt = gateway.state.fleet, "abcd" * 512
            await until(lambda: all(fleet.prefixes.held_by(name) is not None for name in fleet.replicas))
            await gateway.complete(prompt, max_tokens=1)
            chain = fleet.decisions.recent(1)[0].decisions[0].asked.chain
            first = fleet.decisions.recent(1)[0].decisions[0].choice.replica
            await until(lambda: fleet.prefixes.knows_keys(chain))
            assert fleet.prefixes.matched_tokens(first, chain) > 400
            replica = small if first == "r0" else other
            await replica.prefill("another prompt" * 300)
            await until(lambda: fleet.prefixes.matched_tokens(first, chain) == 0)

    asyncio.run(check())
