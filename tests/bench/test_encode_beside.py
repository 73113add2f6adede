"""`millrace bench encode --beside`: every text is embedded once, and gaps of streams are counted by what ran beside."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from millrace.bench.encoding.beside import TEXTS_PER_REQUEST, EncodeBesideBench, verdict


def bench(texts: int = 0) -> EncodeBesideBench:
    return EncodeBesideBench("smollm2", "minilm", [f"text {number}" for number in range(texts)], 200.0)


def test_every_text_is_embedded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    async def embed(self: EncodeBesideBench, session: Any, url: str, texts: list[str]) -> None:
        await asyncio.sleep(0)
        assert len(texts) <= TEXTS_PER_REQUEST
        asked.extend(texts)

    monkeypatch.setattr(EncodeBesideBench, "embed", embed)
    measured = bench(2 * TEXTS_PER_REQUEST + 7)
    asyncio.run(measured.embed_all(None, ""))  # type: ignore[arg-type]
    assert sorted(asked) == sorted(measured.texts)


def test_the_verdict_is_on_the_stream_beside_the_texts() -> None:
    figures = bench(50).figures([10.0] * 100, [20.0] * 98 + [300.0] * 2, 5.0)
    by_name = {(one.workload, one.metric): one.value for one in figures}
    assert by_name["stream beside 50 texts", "gaps over 200 ms"] == 2.0
    assert by_name["stream alone", "gaps over 200 ms"] == 0.0
    assert by_name["embedding beside it", "texts_per_s"] == 10.0
    assert "ABOVE the target of 200 ms" in verdict(figures, 200.0)
    assert "within the target of 200 ms" in verdict(bench(50).figures([10.0], [20.0] * 100, 5.0), 200.0)
