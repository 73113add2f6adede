"""`model: "auto"` through a gateway: the classifier, the cascade, and a budget per tenant that gateways share."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from helpers.gateways import GatewayUnderTest, gateway_over
from helpers.waiting import until

from millrace.bench.gateway.null_replica import NullReplica, answer_text
from millrace.gateway.limits.usage import UsageReader
from millrace.model_router.classifier import save, train
from millrace.model_router.features import features_of
from millrace.model_router.router import RouterSettings

pytestmark = pytest.mark.live

EASY, HARD = "Hello, what is the capital of {}?", "Prove step by step that {} is a square, and derive the general case."


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> str:
    asked = [(text.format(number), text is EASY) for number in range(100) for text in (EASY, HARD)]
    rows = [features_of({"messages": [{"role": "user", "content": text}]}) for text, _ in asked]
    path = tmp_path_factory.mktemp("router") / "router.json"
    save(train(rows, [is_easy for _, is_easy in asked]), path)
    return str(path)


def models(**fields: Any) -> tuple[NullReplica, NullReplica]:
    return NullReplica(model="small", usage=True, **fields), NullReplica(model="large", usage=True)


async def chat(gateway: GatewayUnderTest, text: str, **options: Any) -> tuple[int, Any]:
    body = {"model": "auto", "messages": [{"role": "user", "content": text}], "max_tokens": 8}
    return await gateway.post("/v1/chat/completions", body, **options)


def test_classifier_sends_easy_to_small_and_hard_to_large(file: str) -> None:
    async def check() -> None:
        small, large = models()
        async with gateway_over(small, large, router=RouterSettings("small", "large", file)) as gateway:
            for text, expected in ((EASY, "small"), (HARD, "large")):
                headers = {"X-Request-Id": f"to-{expected}"}
                status, body = await chat(gateway, text.format("it"), headers=headers)
                assert (status, body["model"]) == (200, expected)
                told = (await gateway.get(f"/v1/requests/to-{expected}/explain"))[1]["gateway"]["model"]
                assert told["model"] == expected
                assert "is good enough with probability" in told["reason"]
            assert (small.bodies[0]["model"], large.bodies[0]["model"]) == ("small", "large")
            listed = (await gateway.get("/v1/models"))[1]["data"]
            assert {one["id"] for one in listed} == {"auto", "small", "large"}
            assert (await gateway.get("/v1/models/auto"))[0] == 200
            fleet = (await gateway.get("/v1/fleet"))[1]
            assert fleet["budgets"] == [
                {"tenant": "", "per_hour": None, "left": None, "requests": {"small": 1, "large": 1}}
            ]

    asyncio.run(check())


@pytest.mark.parametrize(("confidence", "expected"), [(0.9, "small"), (0.3, "large")])
def test_cascade_asks_the_small_model_first(confidence: float, expected: str) -> None:
    async def check() -> None:
        small, large = models(confidence=confidence)
        router = RouterSettings("small", "large", min_confidence=0.6)
        async with gateway_over(small, large, router=router) as gateway:
            seen = await gateway.stream("Once", model="auto", max_tokens=12)
            assert (seen.status, seen.text, seen.is_done) == (200, answer_text("Once", 12), True)
            assert seen.headers["X-Millrace-Replica"] == ("r0" if expected == "small" else "r1")
            assert small.bodies[0]["logprobs"] is True, "the probe"
            assert (small.num_requests, large.num_requests) == ((2, 0) if expected == "small" else (1, 1))
            assert (small if expected == "small" else large).bodies[-1]["stream"] is True

    asyncio.run(check())


def test_model_that_nobody_has_is_not_chosen(file: str) -> None:
    async def check() -> None:
        small, large = models()
        async with gateway_over(small, large, router=RouterSettings("small", "large", file)) as gateway:
            await gateway.post("/v1/fleet/replicas/r1/drain", {})
            status, body = await chat(gateway, HARD.format("it"), headers={"X-Request-Id": "mine"})
            assert (status, body["model"]) == (200, "small")
            told = (await gateway.get("/v1/requests/mine/explain"))[1]["gateway"]["model"]["reason"]
            assert told.endswith("No replica has 'large' now, so 'small' answers.")

    asyncio.run(check())


def test_cascade_without_its_large_model_keeps_the_small_one() -> None:
    async def check() -> None:
        small = NullReplica(model="small", confidence=0.3)
        async with gateway_over(small, router=RouterSettings("small", "large", min_confidence=0.6)) as gateway:
            status, body = await chat(gateway, "hi", headers={"X-Request-Id": "mine"})
            assert (status, body["model"]) == (200, "small")
            told = (await gateway.get("/v1/requests/mine/explain"))[1]["gateway"]["model"]["reason"]
            assert "less than 0.60" in told
            assert told.endswith("No replica has 'large' now, so 'small' answers.")

    asyncio.run(check())


def test_spent_budget_holds_at_every_gateway(file: str, tmp_path: Path) -> None:
    """What one gateway's requests cost, the other knows."""
    router = RouterSettings("small", "large", file, large_price=1e6, small_price=0.0, budget_per_hour=0.5)
    store = f"sqlite:{tmp_path / 'limits.db'}"

    async def check() -> None:
        small, large = models()
        async with (
            gateway_over(small, large, router=router, limits_store=store) as one,
            gateway_over(small, large, router=router, limits_store=store) as other,
        ):
            await until(lambda: one.state.limits.scope == other.state.limits.scope == "shared")
            assert (await chat(one, HARD.format("it")))[1]["model"] == "large"
            status, body = await chat(other, HARD.format("it"), headers={"X-Request-Id": "poor"})
            assert (status, body["model"]) == (200, "small")
            told = (await other.get("/v1/requests/poor/explain"))[1]["gateway"]["model"]
            assert "The budget of tenant '' for this hour is spent" in told["reason"]
            assert told["budget_left"] < 0
            assert (await other.get("/v1/fleet"))[1]["budgets"][0]["left"] < 0

    asyncio.run(check())


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b'{"usage":{"prompt_tokens":7,"completion_tokens":5,"total_tokens":12}}', (7, 5)),
        (b'data: {"message":{"usage":{"input_tokens":9,"output_tokens":1}}}', (9, 1)),
        (b'{"done":true,"prompt_eval_count":4,"eval_count":6}', (4, 6)),
        (rb'{"delta":{"content":"he said \"prompt_tokens\": 99"}}', (0, 0)),
    ],
)
def test_usage_of_every_dialect(data: bytes, expected: tuple[int, int]) -> None:
    usage = UsageReader()
    usage.read(data)
    assert (usage.prompt_tokens, usage.output_tokens) == expected
