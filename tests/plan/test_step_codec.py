"""Steps as bytes: what was encoded is decoded again, repeated steps are small, and a missed message is noticed."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from helpers.step_messages import captures, copies, inputs, plain, plans, repeated
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from millrace.plan.codec.decoder import StepDecoder
from millrace.plan.codec.encoder import StepEncoder, encode_plan
from millrace.plan.codec.layout import StepBytesError, StepMessage
from millrace.plan.request import Request
from millrace.plan.scheduler import Scheduler, SchedulerSettings
from millrace.plan.step import BlockCopies, CapturePlan, StepInputs, StepPlan

REPEATED_BYTES, UPDATE_BYTES = 100, 12


@st.composite
def messages(draw: st.DrawFn) -> list[StepMessage]:
    made: list[StepMessage] = []
    last: StepPlan | None = None
    for kind in draw(st.lists(st.sampled_from("prrica"), min_size=1, max_size=6)):
        if kind == "p" or (kind == "r" and last is None):
            last = draw(plans(epoch=None if last is None else last.epoch + 1))
            made.append(last)
        elif kind == "r":
            assert last is not None
            last = draw(repeated(last))
            made.append(last)
        else:
            made.append(draw({"i": inputs(), "c": copies(), "a": captures()}[kind]))
    return made


def encoded(encoder: StepEncoder, message: StepMessage) -> bytes:
    if isinstance(message, StepPlan):
        return encoder.plan(message)
    if isinstance(message, StepInputs):
        return encoder.inputs(message)
    return encoder.copies(message) if isinstance(message, BlockCopies) else encoder.capture(message)


@settings(suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large], deadline=None)
@given(messages())
def test_messages_are_decoded_as_they_were_encoded(sent: list[StepMessage]) -> None:
    encoder, decoder = StepEncoder(), StepDecoder()
    for message in sent:
        assert plain(decoder.decode(encoded(encoder, message))) == plain(message)


@settings(suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large], deadline=None)
@given(messages(), st.data())
def test_bytes_that_are_cut_off_are_an_error_and_not_another_step(sent: list[StepMessage], data: st.DataObject) -> None:
    message, encoder = sent[0], StepEncoder()
    whole = encoded(encoder, message)
    cut = whole[: data.draw(st.integers(0, len(whole) - 8))]
    with pytest.raises(StepBytesError):
        StepDecoder().decode(cut)


def decoding_rows(num_rows: int, num_steps: int) -> list[StepPlan]:
    """Plans of a real scheduler whose rows decode, at different places in their blocks."""
    scheduler = Scheduler(
        SchedulerSettings(num_blocks=num_rows * 20, block_size=16, max_running=num_rows, token_budget=num_rows * 32)
    )
    for index in range(num_rows):
        prompt = np.full(16 + index % 16, index, np.int32)
        scheduler.submit(Request(id=index, prompt=prompt, max_tokens=200))
    made = []
    for step in range(num_steps):
        plan = scheduler.plan(float(step))
        assert plan is not None
        made.append(plan)
        scheduler.apply(plan.step_no, np.full(int(plan.samples.sum()), 7, np.int32))
    return made


def test_a_repeated_step_takes_100_bytes_and_12_for_each_block_update() -> None:
    encoder, decoder = StepEncoder(), StepDecoder()
    made, num_repeated, last = decoding_rows(64, 40), 0, None
    for plan in made:
        data = encoder.plan(plan)
        if last is not None and plan.repeats(last.epoch):
            num_repeated += 1
            assert len(data) <= REPEATED_BYTES + UPDATE_BYTES * len(plan.block_ids)
        assert plain(decoder.decode(data)) == plain(plan)
        last = plan
    assert num_repeated > 30
    assert sum(len(plan.block_ids) for plan in made[2:]) > 64


def test_block_updates_of_groups_take_12_bytes_too() -> None:
    first = decoding_rows(2, 2)[1]
    updates = {name: np.arange(5, dtype=np.int32) for name in ("block_rows", "block_cols", "block_ids", "block_groups")}
    second = dataclasses.replace(first, step_no=first.step_no + 1, starts=first.starts + np.int32(1), **updates)
    encoder, decoder = StepEncoder(), StepDecoder()
    decoder.decode(encoder.plan(first))
    data = encoder.plan(second)
    assert len(data) <= REPEATED_BYTES + UPDATE_BYTES * 5
    assert plain(decoder.decode(data)) == plain(second)


@pytest.mark.parametrize(
    "changed",
    [
        {"draft_places": np.array([1, 2], np.int32)},
        {"scored": np.array([True, False])},
        {"pooled": np.array([True, False])},
        {"draft_floor": 0.5},
    ],
)
def test_a_plan_with_more_than_a_repeated_step_is_written_whole(changed: dict[str, Any]) -> None:
    first = decoding_rows(2, 2)[1]
    second = dataclasses.replace(first, starts=first.starts + np.int32(1), **changed)
    encoder, decoder = StepEncoder(), StepDecoder()
    decoder.decode(encoder.plan(first))
    assert plain(decoder.decode(encoder.plan(second))) == plain(second)


def test_a_missed_message_is_an_error_and_so_is_what_follows() -> None:
    encoder, decoder = StepEncoder(), StepDecoder()
    first, *others = [encoder.plan(plan) for plan in decoding_rows(2, 4)]
    decoder.decode(first)
    for late in others[1:]:
        with pytest.raises(StepBytesError, match="came where 1 was due"):
            decoder.decode(late)
    decoder.decode(others[0])
    with pytest.raises(StepBytesError, match="message 1 came where 2"):
        decoder.decode(others[0])
    with pytest.raises(StepBytesError, match="came where 0 was due"):
        StepDecoder().decode(others[0])


def test_a_repeated_step_needs_the_step_before() -> None:
    encoder = StepEncoder()
    plan = decoding_rows(2, 3)[2]
    encoder._epoch = plan.epoch  # As if the step before had been sent.
    with pytest.raises(StepBytesError, match="repeats a step that was not sent"):
        StepDecoder().decode(encoder.plan(plan))


@pytest.mark.parametrize(
    ("damage", "says"),
    [(lambda data: b"\xff" + data[1:], "unknown kind 255"), (lambda data: data + bytes(8), "8 bytes too many")],
)
def test_damaged_bytes_are_named(damage: Any, says: str) -> None:
    data = encode_plan(decoding_rows(2, 1)[0])
    with pytest.raises(StepBytesError, match=says):
        StepDecoder().decode(damage(data))


def test_nobody_can_modify_a_decoded_plan() -> None:
    encoder, decoder = StepEncoder(), StepDecoder()
    for plan in decoding_rows(2, 3):
        found = decoder.decode(encoder.plan(plan))
        for field in dataclasses.fields(found):
            value = getattr(found, field.name)
            assert not isinstance(value, np.ndarray) or not len(value) or not value.flags.writeable, field.name


def test_a_capture_of_a_shape_is_sent_like_a_plan() -> None:
    shape = decoding_rows(2, 1)[0].shape
    found = StepDecoder().decode(StepEncoder().capture(CapturePlan(shape)))
    assert found == CapturePlan(shape)
