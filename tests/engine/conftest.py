from __future__ import annotations

import pytest


@pytest.fixture(scope="session")
def oracle():
    from helpers.greedy_oracle import GreedyOracle

    from millrace.sources.resolve import resolve_model

    return GreedyOracle(resolve_model("smollm2-135m-instruct").path)


@pytest.fixture(scope="session")
def lone_answers(oracle):
    """Token ids and greedy answer of each prompt, computed one at a time and checked against transformers."""
    from helpers.held_prompts import CHATS, CODE, EMOJI, SCRIPTS, SHORT, long_texts

    from millrace import LLM, SamplingParams

    with LLM(dtype="float32", prefix_cache=False, kv_tokens=8192) as llm:
        prompts = [llm.tokenizer.encode(text) for text in (*SHORT, *SCRIPTS, *EMOJI, *CODE, *long_texts())]
        prompts += [llm.encode_chat(messages) for messages in CHATS]
        answers = []
        for prompt in prompts:
            (generation,) = llm.generate([prompt], SamplingParams(temperature=0, max_tokens=3, ignore_eos=True))
            answers.append((prompt, generation.token_ids))
    return answers, oracle.differences(answers)
