"""Measured studies: what they count, what they refuse, and that mechanisms are really switched off."""

from __future__ import annotations

import json
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self

import pytest

from millrace.bench.studies import answers, formats, kv_formats, mechanisms, sessions
from millrace.bench.studies.constraints import Person, is_valid
from millrace.bench.studies.documents import overlap
from millrace.bench.studies.measured import Asked, TimeLimit, ratio_of_medians, rounds_said
from millrace.bench.studies.registry import MEASURED
from millrace.cli import main
from millrace.config import Config, MemoryConfig, ModelConfig, RunConfig
from millrace.errors import ConfigError, EngineUnavailable
from millrace.simulate.real_engine import RealEngine
from millrace.simulate.requests import SimulatedRequest

TINY = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "max_position_embeddings": 256,
    "tie_word_embeddings": True,
}
END = 0


class CountingModel:
    """Reasons for five tokens and then ends; answers with the number of reasoning tokens that it was given."""

    def __init__(self, *_: object, **__: object) -> None:
        self.max_context = 2000
        self.chat_template = SimpleNamespace(render=lambda messages: messages[0]["content"])
        self.tokenizer = SimpleNamespace(encode=lambda text, add_special: [7] if "final answer is" in text else [1, 1])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None: ...

    def generate(self, prompts: list[list[int]], max_tokens: int, **_: object) -> list[Any]:
        found = []
        for prompt in prompts:
            text = f"It is {prompt.count(5)}."
            choice = SimpleNamespace(token_ids=[5, 5, 5, 5, 5, END][:max_tokens], stopped_by=END)
            found.append(SimpleNamespace(text=text, choices=[choice]))
        return found


def test_reasoning_is_cut_at_each_budget_and_ends_before_its_end_token(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(answers, "LLM", CountingModel)
    monkeypatch.setattr(answers, "BUDGETS", (0, 3, 8))
    data = tmp_path / "problems.jsonl"
    problems = [{"question": "How many?", "answer": f"As many.\n#### {right}"} for right in ("3", "5", "1,000")]
    data.write_text("\n".join(map(json.dumps, problems)))
    found = answers.thinking_length(Asked("a model", samples=3, data=data))
    assert [row[:3] for row in found.rows] == [(0, 0.0, 0), (3, 3.0, 1), (8, 5.0, 1)]


@pytest.mark.parametrize("text", ["", "{}", '{"question": "?", "answer": "no number"}'])
def test_a_file_without_problems_is_refused(text: str, tmp_path: Path) -> None:
    data = tmp_path / "problems.jsonl"
    data.write_text(text)
    with pytest.raises(ConfigError, match="problems"):
        answers.thinking_length(Asked("a model", 3, data=data))
    assert main(["study", "thinking-length"]) != 0  # No file at all.


def test_the_first_number_of_an_answer_counts() -> None:
    found = [answers.first_number(text) for text in ("$1,234.50 or 3", "-7", "none", "72 clips")]
    assert found == [1234.5, -7, None, 72]


def test_a_needle_is_as_deep_as_asked_and_the_text_as_long() -> None:
    words = SimpleNamespace(tokenizer=SimpleNamespace(encode=lambda text, add_special: text.split()))
    text = answers.haystack(random.Random(0), 1000, 0.5, "NEEDLE.", words)  # type: ignore[arg-type]
    place = text.split().index("NEEDLE.")
    assert 900 < len(text.split()) < 1000
    assert place / len(text.split()) == pytest.approx(0.5, abs=0.05)


class Clock:
    """Shows the time that work has taken."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_time_limit_leaves_out_rounds_that_would_end_late_but_not_the_first() -> None:
    clock = Clock()
    limit = TimeLimit(1.0, clock)
    done = []
    for number in limit.rounds(9):
        clock.now += (10.0, 25.0, 1.0)[number]  # The slowest so far counts: three end after 36 s, four after 61 s.
        done.append(number)
    assert done == [0, 1, 2]
    assert list(TimeLimit(0.0, Clock()).rounds(3)) == [0, 1, 2]  # No time passes.
    done.clear()
    for number in TimeLimit(0.5, clock).rounds(3):
        clock.now += 31.0
        done.append(number)
    assert done == [0]
    assert rounds_said(3, Asked("", 3)) == " 3 rounds."
    assert rounds_said(1, Asked("", 3)) == " 1 round of 3; the others would not have ended in time."


def test_long_texts_are_left_out_before_their_time_and_samples_before_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()

    class Opened(CountingModel):
        def __init__(self, *_: object, **__: object) -> None:
            self.max_context = 3000

    def found(llm: object, draw: random.Random, length: int, samples: int) -> tuple[list[list[int]], list[int]]:
        clock.now += 10 * (length / 512) ** 1.5  # 10, 28.3 and 80 s.
        asks.append((length, draw.random()))
        return [[0] * length] * 3, [1, 0, 1]

    asks: list[tuple[int, float]] = []
    monkeypatch.setattr(answers, "found_needles", found)
    monkeypatch.setattr(answers, "TimeLimit", lambda minutes: TimeLimit(minutes, clock))
    monkeypatch.setattr(answers, "LLM", Opened)
    recall = answers.needle_recall(Asked("a,b", 2, minutes=2 * 130 / 60))
    assert [length for length, _ in asks] == [512, 1024, 2048, 512] * 2
    assert len(set(asks)) == 4  # Both models read the same texts.
    assert recall.rows[0] == ("a", 512, 512.0, "2 of 2", "0 of 2", "2 of 2", pytest.approx(200 / 3))
    assert recall.rows[5] == ("b", 2048, 2048.0, "1 of 1", "0 of 1", "1 of 1", pytest.approx(200 / 3))
    assert "Too long" not in recall.conclusion
    short = answers.needle_recall(Asked("a", 2, minutes=0.5))
    assert short.conclusion.startswith(
        "a finds 67% of the numbers in 512 tokens. Too long for the time limit: 1,024, 2,048."
    )


def test_products_are_compared_by_case(monkeypatch: pytest.MonkeyPatch) -> None:
    class Opened(CountingModel):
        def __init__(self, *_: object, quantization: str, dtype: str, **__: object) -> None:
            self.slowness = {"int8": 1.0, "none": 3.0}[quantization] + (dtype == "bfloat16")
            self.ready = SimpleNamespace(memory_plan={"weights": 1 << 20})

    monkeypatch.setattr(formats, "LLM", Opened)
    monkeypatch.setattr(formats, "step_ms", lambda llm, batch: llm.slowness * batch)
    monkeypatch.setattr(formats, "prompt_ms", lambda llm: 2 * llm.slowness)
    monkeypatch.setattr(formats, "perplexity", lambda llm, *_: (10 / llm.slowness, 1))
    found = formats.w4a8(Asked("a model", 2))
    assert found.rows[1][1:] == (1.0, 3.0, 48.0, 6.0, 3.0, 3.0, 3.0, 10 / 3)
    assert found.rows[2][5:8] == (4.0, 4.0, 4.0)
    assert "stay the default" in found.conclusion
    assert found.conclusion.endswith(" 2 rounds.")


class SmallCache:
    """Has two formats; a step takes twice as long in the second."""

    def __init__(self, *_: object, kv_dtype: str, kv_tokens: int, **__: object) -> None:
        sizes = {"full": 100, "int4": 25}
        if kv_dtype not in sizes:
            raise EngineUnavailable(f"memory.kv_dtype is {kv_dtype}, which is for a GPU.")
        self.kv_dtype = kv_dtype
        pool = {f"KV pool, {kv_tokens} tokens": sizes[kv_dtype] * kv_tokens}
        self.ready = SimpleNamespace(memory_plan={"weights": 7} | pool)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None: ...


def test_formats_that_the_machine_lacks_are_named_and_the_others_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = {"full": 2.0, "int4": 4.0}
    monkeypatch.setattr(kv_formats, "LLM", SmallCache)
    monkeypatch.setattr(kv_formats, "long_step_ms", lambda llm, number: steps[llm.kv_dtype] * (1 + number))
    monkeypatch.setattr(kv_formats, "perplexity", lambda llm, *_: (10 / steps[llm.kv_dtype], 1))
    monkeypatch.setattr(kv_formats, "found_needles", lambda *_: ([], [1, 2, 0]))
    found = kv_formats.kv_formats(Asked("one,other", 3))
    assert found.rows == [
        (model, *row)
        for model in ("one", "other")
        for row in (
            ("full", 100.0, (1 << 30) / 100, 4.0, 1.0, 5.0, 3),
            ("int4", 25.0, (1 << 30) / 25, 8.0, 2.0, 2.5, 3),
        )
    ]
    assert "4.0 times fewer bytes" in found.conclusion
    assert "Not on this machine or for this model: packed, float16, fp8, int8. 3 rounds." in found.conclusion


def test_an_answer_fits_a_schema_or_does_not() -> None:
    assert is_valid(Person, ' {"name": "a", "age": 3, "city": "b"}\n')
    assert not is_valid(Person, '{"name": "a", "age": "3", "city": "b"}')
    assert not is_valid(Person, 'Here it is: {"name": "a", "age": 3, "city": "b"}')


def test_overlap_counts_words_that_both_texts_have() -> None:
    assert overlap("a b b c".split(), "b b b d".split()) == 0.5
    assert overlap([], []) == 0.0


def test_a_slow_phase_of_the_machine_does_not_change_a_ratio() -> None:
    assert ratio_of_medians([2.0, 20.0, 2.0], [1.0, 10.0, 1.0]) == 2


def test_mechanisms_are_switched_off_and_what_a_cpu_lacks_is_said(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps(TINY))
    model = f"random:{config}"
    small = {"ROWS": (1, 2, 3), "OUTPUT": 4, "PREFIX": 64, "SUFFIX": 16, "KV_TOKENS": 1024}
    for name, value in small.items():
        monkeypatch.setattr(mechanisms, name, value)
    depths = dict[str, set[int]]()

    class Watched(RealEngine):
        def replica(self, *given: Any, **named: Any) -> Any:
            depths.setdefault(str(self.facts.slow_step_s), set()).add(self.facts.steps_in_flight)
            return super().replica(*given, **named)

    monkeypatch.setattr(mechanisms, "RealEngine", Watched)
    monkeypatch.setattr(mechanisms.torch.cuda, "is_available", lambda: False)
    found = mechanisms.mechanisms(Asked(model, samples=2))
    assert depths == {"0.05": {1, 2}, "inf": {2}}
    measured = {row[0]: row[1:] for row in found.rows}
    assert set(measured) == set(mechanisms.CHANGES)
    for name in ("no CUDA graphs", "no split of long contexts (FlashDecoding)"):
        assert set(measured[name]) == {mechanisms.NOT_MEASURED}
    assert measured["as shipped"][-2:] == (1, 1)


def test_one_step_in_flight_gives_the_same_answers(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps(TINY))
    settings = Config(
        model=ModelConfig(source=f"random:{config}"), memory=MemoryConfig(kv_tokens=512), run=RunConfig(device="cpu")
    )
    engine = RealEngine(settings, mechanisms.CHANGES["no overlap of steps"][2])
    try:
        done = engine.run([SimulatedRequest(0.0, 16, 5)] * 3)
    finally:
        engine.close()
    assert [record.output_tokens for record in done.outcome.records] == [5, 5, 5]


def test_measured_studies_take_no_profile(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["study"]) == 0
    listed = capsys.readouterr().out
    assert all(f"{name:<18}measured" in listed for name in MEASURED)
    assert main(["study", "w4a8", "--profile", "h200-8b"]) == 2
    assert main(["study", "chunk-size", "--profile", "h200-8b", "--samples", "3"]) == 2
    capsys.readouterr()
    assert main(["study", "cold-start", "--minutes", "3"]) == 2
    assert "cold-start has no time limit" in capsys.readouterr().err
    assert main(["study", "w4a8", "--minutes", "0"]) == 2


def test_sessions_are_compared_with_computing_them_again() -> None:
    asked = list[str]()

    class Canned(sessions.Server):
        def ask(self, path: str, body: Any = None, method: str | None = None) -> tuple[float, Any]:
            asked.append(path)
            is_whole = path == "/v1/chat/completions"
            turn = {"prompt_tokens": 100, "loaded_tokens": 80, "computed_tokens": 20, "recomputed_tokens": 2}
            return (2.0 if is_whole else 0.5), {"id": f"s{len(asked)}", "last_turn": turn}

    found = sessions.measure(Canned(""), Asked("tiny", samples=5), 8192)
    shares = {row[0]: row[-1] for row in found.rows}
    assert shares["its second turn, as a session"] == 0.25
    assert "400 came back" in found.conclusion
    assert "at most 20 in a turn; 10 of them" in found.conclusion
    assert sum(path.endswith("/turns") for path in asked) == 10
    assert sum(path == "/v1/cache" for path in asked) == 10
    turns = [path for path in asked if path.endswith("/turns") or path == "/v1/chat/completions"]
    assert [path == "/v1/chat/completions" for path in turns[5:]] == [False] * 3 + [True] * 3 + [False] * 2 + [True] * 2
