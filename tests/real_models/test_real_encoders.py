"""The encoders that package registries hold, and the example that uses them."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from millrace.models.encoders.encoder import pack
from millrace.models.encoders.load import load_encoder
from millrace.sources.encoders.known_encoders import KNOWN_ENCODERS
from millrace.sources.resolve import resolve_model
from millrace.text.tokenizers.load import load_tokenizer

pytestmark = [pytest.mark.real_models, pytest.mark.live, pytest.mark.timeout(1800)]

CPU = torch.device("cpu")
ROOT = Path(__file__).parents[2]
QUERY = "What is the capital of France?"
TEXTS = ("Paris is the capital of France.", "Berlin is the capital of Germany.", "Cats sleep most of the day.")


@pytest.mark.parametrize("known", KNOWN_ENCODERS, ids=lambda known: known.name)
def test_the_text_that_answers_is_the_best(known: object) -> None:
    name = getattr(known, "name", "")
    files = resolve_model(name)
    assert files.name == name
    loaded, tokenizer = load_encoder(files, device=CPU, dtype=torch.float32), load_tokenizer(files)
    pair = loaded.files.pair
    texts = [QUERY, *TEXTS] if pair is None else [pair.joined(QUERY, text) for text in TEXTS]
    packed, order = pack([tokenizer.encode(text) for text in texts], [0] * len(texts), [0] * len(texts))
    found = dict(zip(order, loaded.head(loaded.encoder(packed), packed), strict=True))
    results = [found[index] for index in range(len(texts))]
    if pair is None:
        scores = [float(results[0] @ other) for other in results[1:]]
    else:
        scores = [float(torch.softmax(logits, -1)[pair.label]) for logits in results]
    assert scores == sorted(scores, reverse=True)
    assert scores[0] > scores[2] + 0.1


def test_the_example_answers_with_its_sources() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "rag.py"), "--compare", "Who built the old mill, and when?"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=1500,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert "source: mill.txt" in done.stdout
    assert "cold prefix: 0 of" in done.stdout
    assert "warm prefix: 0 of" not in done.stdout
    assert re.search(r"reordered documents: [1-9]\d* of", done.stdout)
