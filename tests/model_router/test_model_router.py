from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from millrace.cli import main
from millrace.errors import ConfigError
from millrace.model_router.budgets import Budgets
from millrace.model_router.classifier import Classifier, load, save, train
from millrace.model_router.curve import auc, curve
from millrace.model_router.examples import Example, read_examples
from millrace.model_router.features import NUM_FEATURES, features_of
from millrace.model_router.router import ModelRouter, RouterSettings, confidence

EASY = ("Hello, what is the capital of {}?", "Translate {} into French.", "Thanks! Spell {} for me.")
HARD = (
    "Prove step by step that the sum of {} odd numbers is a square, and derive the general case.",
    "Refactor this code and analyse its cost:\n```\ndef f(n):\n    return {} + f(n - 1)\n```",
    "Design a protocol for {} replicas, compare it with Paxos, and explain why it is safe.",
)


def asked(text: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}]}


def lines(count: int, seed: int = 1) -> list[dict[str, Any]]:
    rng = random.Random(seed)
    made = []
    for number in range(count):
        is_easy = rng.random() < 0.5
        text = rng.choice(EASY if is_easy else HARD).format(f"{rng.choice('abcdefgh')}{number}")
        small = 1.0 if is_easy != (rng.random() < 0.05) else 0.0
        made.append({**asked(text), "small": small, "large": 1.0, "confidence": 0.9 if small else 0.3})
    return made


def written(directory: Path, made: list[dict[str, Any]]) -> Path:
    file = directory / "answers.jsonl"
    file.write_text("".join(json.dumps(one) + "\n" for one in made))
    return file


@pytest.fixture(scope="module")
def classifier() -> Classifier:
    made = lines(300)
    return train([features_of(one) for one in made], [bool(one["small"]) for one in made])


def test_requests_of_every_dialect_and_odd_ones_have_features() -> None:
    odd: list[dict[str, Any]] = [
        {},
        {"messages": None},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "Prove it?"}]}, {"content": None}, 7]},
        {"prompt": ["a", "b"]},
        {"input": "Hi", "max_output_tokens": 10, "tools": [{}], "text": {"format": {}}},
        {"prompt": "x" * 1_000_000, "max_tokens": -3},
    ]
    for request in odd:
        found = features_of(request)
        assert found.shape == (NUM_FEATURES,)
        assert np.isfinite(found).all()
    assert (features_of(odd[2]) == features_of(odd[2])).all()


def test_what_was_trained_tells_easy_from_hard_and_says_why(classifier: Classifier) -> None:
    router = ModelRouter(RouterSettings("small", "large", file="router.json"), classifier)
    easy = router.decide(asked("Hello, what is the capital of Peru?"), "acme", 0.0)
    hard = router.decide(asked("Prove step by step that it is a square, and derive the general case."), "acme", 0.0)
    assert (easy.model, hard.model) == ("small", "large")
    assert easy.probability is not None
    assert hard.probability is not None
    assert easy.probability > 0.8 > 0.2 > hard.probability
    assert "0.50 is required, so 'large' answers" in hard.reason
    assert len(hard.features) == 3
    assert hard.features[0][1] < 0, "what counted most was against the small model"


def test_training_is_repeatable_and_survives_a_file(tmp_path: Path, classifier: Classifier) -> None:
    made = lines(300)
    again = train([features_of(one) for one in made], [bool(one["small"]) for one in made])
    assert again == classifier
    save(classifier, tmp_path / "router.json")
    assert load(tmp_path / "router.json") == classifier
    (tmp_path / "router.json").write_text("{}")
    with pytest.raises(ConfigError, match="no router"):
        load(tmp_path / "router.json")
    with pytest.raises(ConfigError, match="of one kind"):
        train([features_of(made[0])] * 3, [True] * 3)


def test_a_cascade_keeps_confident_answers_and_asks_the_large_model_otherwise() -> None:
    router = ModelRouter(RouterSettings("small", "large", min_confidence=0.6), None)
    first = router.decide(asked("Hi"), "acme", 0.0)
    assert (first.model, first.is_cascade) == ("small", True)
    sure = router.after_answer(first, [math.log(0.9)] * 5, "acme", 0.0)
    assert (sure.model, sure.is_cascade) == ("small", False)
    unsure = router.after_answer(first, [math.log(0.9), math.log(0.1)], "acme", 0.0)
    assert (unsure.model, "less than 0.60" in unsure.reason) == ("large", True)
    assert confidence([]) == 0.0


def test_a_tenant_without_budget_gets_the_small_model_until_it_is_refilled(classifier: Classifier) -> None:
    settings = RouterSettings("small", "large", file="f", large_price=10.0, budgets={"acme": 1.0})
    router, hard = ModelRouter(settings, classifier), asked(HARD[0].format(3))
    assert router.decide(hard, "acme", 0.0).model == "large"
    router.spent("acme", "large", 100_000, 0.0)
    spent = router.decide(hard, "acme", 0.0)
    assert (spent.model, spent.budget_left, "is spent" in spent.reason) == ("small", 0.0, True)
    assert router.decide(hard, "other", 0.0).model == "large"
    assert router.decide(hard, "acme", 1800.0).budget_left == 0.5
    cascade = ModelRouter(RouterSettings("small", "large", min_confidence=0.6, budgets={"acme": 1.0}), None)
    first = cascade.decide(hard, "acme", 0.0)
    cascade.spent("acme", "large", 200_000, 0.0)
    assert cascade.after_answer(first, [-5.0], "acme", 0.0).model == "small"


def test_budgets_forget_tenants_that_owe_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("millrace.model_router.budgets.MAX_TENANTS", 10)
    budgets = Budgets(1.0, {})
    for number in range(100):
        budgets.spend(f"tenant {number}", 0.1, float(number) * 3600)
    assert len(budgets.spent) <= 10


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"large": "small", "file": "f"}, "both 'small'"),
        ({"threshold": 2.0, "file": "f"}, "threshold is 2"),
        ({}, "set 'file'"),
    ],
)
def test_wrong_settings_are_named(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        RouterSettings(**{"small": "small", "large": "large", **fields})


def test_the_curve_ends_at_both_models_and_a_good_score_beats_a_random_mix() -> None:
    zeros = np.zeros(NUM_FEATURES)
    examples = [Example(zeros, float(number % 2), 1.0, confidence=0.8 * (number % 2) + 0.1) for number in range(40)]

    def score(one: Example) -> float:
        return one.confidence or 0.0

    points = curve(examples, score, price_ratio=10.0, is_cascade=False)
    assert (points[0].large_share, points[0].quality, points[0].cost) == (0.0, 0.5, 0.1)
    assert (points[-1].large_share, points[-1].quality, points[-1].cost) == (1.0, 1.0, 1.0)
    middle = points[10]
    assert (middle.large_share, middle.quality) == (0.5, 1.0)
    assert middle.random_quality == pytest.approx(0.75)
    assert auc(examples, score, 0.0) == 1.0
    paid = curve(examples, score, price_ratio=10.0, is_cascade=True)
    assert paid[10].cost == pytest.approx(0.6), "half of the large answers, and every small one"


def test_train_and_eval_on_local_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data, file, drawn = written(tmp_path, lines(300)), tmp_path / "router.json", tmp_path / "curve.svg"
    assert main(["router", "train", str(data), "--file", str(file), "--json"]) == 0
    trained = json.loads(capsys.readouterr().out)
    assert trained["auc"] > 0.9
    assert trained["held_out"] > 30
    assert main(["router", "eval", str(data), "--file", str(file), "--plot", str(drawn), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["requests"] == trained["held_out"]
    assert any(one["quality"] > one["random_quality"] + 0.1 for one in found["points"])
    assert drawn.read_text().startswith("<svg")
    assert main(["router", "eval", str(data), "--cascade"]) == 0
    assert "AUC 1.000" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "line 2: it is not JSON"),
        ('{"small": 1, "large": 1}', "line 2: it has no 'messages'"),
        ('{"prompt": "a", "small": 2, "large": 1}', "'small' is 2"),
        ('{"prompt": "a", "small": 1, "large": 1, "confidence": -1}', "'confidence' is -1"),
    ],
)
def test_mistakes_in_the_data_are_named_with_their_line(tmp_path: Path, line: str, said: str) -> None:
    file = tmp_path / "answers.jsonl"
    file.write_text('{"prompt": "a", "small": 1, "large": 1}\n' + line + "\n")
    with pytest.raises(ConfigError) as caught:
        read_examples(file)
    assert said in caught.value.message
