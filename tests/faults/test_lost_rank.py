"""Streams of a model split over ranks go on, to the same text, when a rank is killed or stands still."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers.served import Served, serving, wait_until
from helpers.tiny_server import NAME, tiny_options

pytestmark = [pytest.mark.live, pytest.mark.timeout(600)]

LENGTH = 250


def streams_of(served: Served) -> list[Iterator[dict[str, Any]]]:
    fields: dict[str, Any] = {"model": NAME, "max_tokens": LENGTH}
    greedy, drawn = {"temperature": 0}, {"temperature": 0.9, "seed": 7}
    asked = [
        greedy | {"prompt": "One"},
        drawn | {"prompt": "Two"},
        greedy | {"prompt": "Three", "logit_bias": {"300": 1}},
    ]
    return [iter(served.open_stream(**fields, **own)) for own in asked]


def texts_of(streams: list[Iterator[dict[str, Any]]], begun: list[dict[str, Any]]) -> list[str]:
    """To the end of every stream."""
    texts = []
    for first, rest in zip(begun, streams, strict=True):
        events = [first, *rest]
        assert not [event["error"] for event in events if "error" in event]
        assert events[-1]["choices"][0]["finish_reason"] == "length"
        texts.append("".join(event["choices"][0]["text"] for event in events))
    return texts


def test_streams_survive_a_rank_that_is_killed_and_one_that_stands_still(tmp_path: Path) -> None:
    with serving(*tiny_options(tmp_path), "--tensor-parallel", "2") as served:
        streams = streams_of(served)
        expected = texts_of(streams, [next(stream) for stream in streams])
        for number, harm in enumerate((signal.SIGKILL, signal.SIGSTOP), 1):
            streams = streams_of(served)
            begun = [next(stream) for stream in streams]
            os.kill(served.child("rank_child"), harm)
            assert texts_of(streams, begun) == expected
            wait_until(
                lambda number=number: served.metric("millrace_engine_starts_total") == number + 1, "the next engine"
            )
        assert served.log.count("The engine ends with it.") >= 2
        assert "Rank 1 of 2 has ended: its process has exit code -9." in served.log
        assert "Rank 1 of 2 has stalled: no sign of it for 5 s." in served.log
        assert served.metric("millrace_resumed_sequences_total") >= 2
        assert served.metric("millrace_given_up_sequences_total") == 0
