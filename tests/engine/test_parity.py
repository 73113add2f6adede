"""Greedy output of the default model equals Hugging Face's, token for token: alone, batched and under churn."""

from __future__ import annotations

import asyncio
import random

import pytest
from helpers.engine_stats import stats_after

from millrace import LLM, SamplingParams

pytestmark = pytest.mark.timeout(900)  # Computes every answer one at a time, on machines of any speed.
LENGTH = 3
GREEDY = SamplingParams(temperature=0, max_tokens=LENGTH, ignore_eos=True)


def test_alone(lone_answers) -> None:
    answers, differences = lone_answers
    assert len(answers) >= 60
    assert max(len(prompt) for prompt, _ in answers) > 1000
    assert differences == {}


@pytest.mark.parametrize(
    ("limits", "longest"),
    [
        pytest.param(
            {"kv_tokens": 400, "token_budget": 64, "max_running": 12, "block_size": 5}, 180,
            id="a tiny pool of odd blocks that requests wait for",
        ),
        pytest.param({"kv_tokens": 20_000, "max_running": 3, "token_budget": 3}, 8, id="chunks of one to three tokens"),
    ],
)  # fmt: skip
def test_all_at_once(lone_answers, limits: dict[str, int], longest: int) -> None:
    answers = [answer for answer in lone_answers[0] if len(answer[0]) <= longest]
    assert len(answers) > 20
    with LLM(dtype="float32", **limits) as llm:
        generations = llm.generate([prompt for prompt, _ in answers], GREEDY)
    assert [generation.token_ids for generation in generations] == [output for _, output in answers]


@pytest.mark.parametrize("chunk", [1, 33])
def test_prompts_in_chunks(lone_answers, chunk: int) -> None:
    answers, _ = lone_answers
    prompt, output = next(answer for answer in answers if 33 < len(answer[0]) < 90)
    with LLM(dtype="float32", max_running=1, token_budget=chunk, kv_tokens=2048) as llm:
        assert llm.generate([prompt], GREEDY)[0].token_ids == output


def test_under_churn(lone_answers) -> None:
    """Random arrivals and cancellations with prefix hits and preemptions; at the end nothing leaks."""
    answers, _ = lone_answers
    rng = random.Random(7)
    jobs = [rng.choice([answer for answer in answers if len(answer[0]) < 400]) for _ in range(60)]

    async def one(llm: LLM, prompt: list[int], output: list[int], delay: float, cancel_at: int | None) -> None:
        await asyncio.sleep(delay)
        got: list[int] = []
        async for part in llm.stream(prompt, GREEDY):
            if part.token_id is not None:
                got.append(part.token_id)
            if cancel_at is not None and len(got) >= cancel_at:
                break
        assert got == output[: len(got)]
        assert cancel_at is not None or len(got) == len(output)

    async def churn(llm: LLM) -> None:
        tasks = [
            one(llm, prompt, output, rng.uniform(0, 2), rng.randrange(1, LENGTH) if rng.random() < 0.3 else None)
            for prompt, output in jobs
        ]
        await asyncio.gather(*tasks)
        stats = await asyncio.to_thread(stats_after, llm, len(jobs))
        assert stats.blocks_free + stats.blocks_cached == stats.blocks_total, "a KV block leaked"
        assert stats.prefix_hit_tokens > 0

    with LLM(dtype="float32", kv_tokens=640, max_running=10, token_budget=96) as llm:
        asyncio.run(churn(llm))


def test_choices_share_the_prompt_and_follow_their_seeds() -> None:
    prompt = "The mill wheel turned slowly while the river " * 4
    params = SamplingParams(temperature=1.0, seed=42, max_tokens=12, n=4)
    with LLM(dtype="float32", kv_tokens=4000) as llm:
        (output,) = llm.generate([prompt], params)
        texts = [choice.text for choice in output.choices]
        assert len(set(texts)) > 1
        for index in range(4):
            (alone,) = llm.generate([prompt], SamplingParams(temperature=1.0, seed=42 + index, max_tokens=12))
            assert alone.text == texts[index]
        assert stats_after(llm, 8).prefix_hit_tokens >= 3 * 32


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_seed_gives_the_same_text_in_any_batch(dtype: str) -> None:
    params = SamplingParams(temperature=0.9, top_p=0.95, seed=123, max_tokens=24)
    prompt = "Write a short story about a lighthouse keeper."
    with LLM(dtype=dtype, kv_tokens=8000) as llm:
        alone = llm.generate([prompt], params)[0].text
        others = [f"Story number {index}: " + "word " * (index * 7 % 50) for index in range(11)]
        batched = llm.generate([*others[:5], prompt, *others[5:]], [*[GREEDY] * 5, params, *[GREEDY] * 6])
        assert batched[5].text == alone


def test_logprobs_equal_a_softmax_of_the_oracle(lone_answers, oracle) -> None:
    import torch

    answers, _ = lone_answers
    prompt = answers[8][0]
    with LLM(dtype="float32", kv_tokens=2000, token_budget=5, max_running=2) as llm:
        (generation,) = llm.generate(
            [prompt], SamplingParams(temperature=0, max_tokens=4, logprobs=3, prompt_logprobs=2)
        )
    with torch.inference_mode():
        logits = oracle.model(torch.tensor([[*prompt, *generation.token_ids]])).logits[0]
    reference = torch.log_softmax(logits, -1)
    scores = generation.choices[0].logprobs
    assert scores is not None
    for index, entry in enumerate(scores):
        line = reference[len(prompt) - 1 + index]
        assert entry.top_ids == tuple(line.topk(3).indices.tolist())
        assert entry.logprob == pytest.approx(float(line[entry.token_id]), abs=2e-4)
    assert generation.prompt_logprobs is not None
    assert len(generation.prompt_logprobs) == len(prompt)
    assert generation.prompt_logprobs[0] is None
    for position, entry in enumerate(generation.prompt_logprobs[1:], start=1):
        assert entry is not None
        assert entry.token_id == prompt[position]
        assert entry.logprob == pytest.approx(float(reference[position - 1, prompt[position]]), abs=2e-4)
        assert len(entry.top_ids) == 2
