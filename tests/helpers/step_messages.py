"""Generated step messages of every kind, and a form of them in which they can be compared."""

from __future__ import annotations

import dataclasses
from typing import Any, get_args

import msgspec
import numpy as np
from hypothesis import strategies as st

from millrace.params.classes import FinishReason
from millrace.params.draws import DrawParams
from millrace.params.rows import RowParams
from millrace.plan.step import (
    Admission,
    Appended,
    BlockCopies,
    CapturePlan,
    DrawShape,
    ForcedDrafts,
    HeadShape,
    Kind,
    Location,
    Masks,
    PlacedTokens,
    Release,
    StateCopies,
    StepInputs,
    StepPlan,
    StepShape,
    TrainedPlaces,
    Variant,
)

INT = st.integers(0, 2**31 - 1)
SMALL = st.integers(0, 4000)
LOCATION = st.sampled_from(get_args(Location))
FLOAT = st.floats(-(2**100), 2**100, allow_nan=False)
IDS = st.lists(INT, max_size=5).map(tuple)
DRAW_FIELDS = {
    "seed": st.integers(-(2**63), 2**64 - 1) | st.none(),
    "logit_bias": st.lists(st.tuples(INT, FLOAT), max_size=4).map(tuple),
    "logprobs": st.integers(0, 20) | st.none(),
    "prompt_logprobs": st.integers(0, 20) | st.none(),
    "pooling": st.sampled_from(["", "last", "mean"]),
    "prediction": IDS,
    "speculate": st.text(max_size=8),
    "dry_breaker_ids": IDS | st.none(),
    "logits_processors": st.lists(st.text(max_size=8), max_size=2).map(tuple),
    "bad_word_ids": st.lists(IDS, max_size=3).map(tuple) | st.none(),
    "allowed_token_ids": IDS | st.none(),
}
NUMBERS = {"int": st.integers(-1, 2**31 - 1), "float": FLOAT}


def draw_params() -> st.SearchStrategy[DrawParams]:
    """With a value of every field, half of the time."""
    fields = msgspec.structs.fields(DrawParams)
    values = {one.name: NUMBERS[one.type.__name__] for one in fields if one.name not in DRAW_FIELDS} | DRAW_FIELDS
    return st.fixed_dictionaries({}, optional=values).map(lambda given: DrawParams(**given))


def ints(count: int, values: st.SearchStrategy[int] = INT, dtype: Any = np.int32) -> st.SearchStrategy[Any]:
    return st.lists(values, min_size=count, max_size=count).map(lambda found: np.array(found, dtype))


def tokens() -> st.SearchStrategy[Any]:
    return st.integers(0, 6).flatmap(ints)


def shapes() -> st.SearchStrategy[StepShape]:
    kinds = {"int": INT, "Kind": st.sampled_from(get_args(Kind))}
    return st.builds(StepShape, **{field.name: kinds[str(field.type)] for field in dataclasses.fields(StepShape)})


def state_copies(count: int) -> st.SearchStrategy[StateCopies]:
    return st.builds(StateCopies, ints(count), ints(count), ints(count), st.integers(0, count))


@st.composite
def plans(draw: st.DrawFn, step_no: int | None = None, epoch: int | None = None) -> StepPlan:
    num_rows, num_updates = draw(st.integers(0, 5)), draw(st.integers(0, 5))
    row_params = st.builds(RowParams, draw_params(), IDS, st.text(max_size=8))
    column, bools = ints(num_rows), st.none() | ints(num_rows, st.booleans(), np.bool_)
    reasons = st.sampled_from([*get_args(FinishReason), "preempted"])
    given = {
        "step_no": st.integers(0, 2**40) if step_no is None else st.just(step_no),
        "rows": column,
        "starts": column,
        "counts": column,
        "samples": ints(num_rows, st.booleans(), np.bool_),
        "block_rows": ints(num_updates, SMALL),
        "block_cols": ints(num_updates),
        "block_ids": ints(num_updates),
        "shape": shapes(),
        "admitted": st.lists(st.builds(Admission, SMALL, st.integers(0, 2**60), tokens(), SMALL, row_params, INT, INT)),
        "released": st.lists(st.builds(Release, SMALL, st.integers(0, 2**60), reasons)),
        "appended": st.lists(st.builds(Appended, SMALL, INT, tokens())),
        "shared_blocks": INT,
        "block_groups": st.none() | ints(num_updates, st.integers(0, 9)),
        "draft_places": st.none() | column,
        "draft_floor": FLOAT,
        "trained": st.none() | st.builds(TrainedPlaces, column, FLOAT),
        "trained_rests": st.booleans(),
        "forced": st.lists(st.builds(ForcedDrafts, SMALL, tokens())),
        "placed": st.lists(st.builds(PlacedTokens, tokens(), INT, tokens(), INT, INT, INT)),
        "masked": bools,
        "scored": bools,
        "pooled": bools,
        "states": st.none() | st.integers(1, 4).flatmap(state_copies),
        "draw": st.builds(DrawShape, SMALL, SMALL, st.booleans()),
        "captures": st.just(()),
        "epoch": st.integers(0, 2**40) if epoch is None else st.just(epoch),
    }
    assert set(given) == {field.name for field in dataclasses.fields(StepPlan)}, "every field is generated"
    values = {name: draw(strategy) for name, strategy in given.items()}
    plan = StepPlan(**{name: tuple(value) if isinstance(value, list) else value for name, value in values.items()})
    plan.captures = tuple(part for part in (plan.shape, *plan.draw.heads) if draw(st.booleans()))
    return plan


@st.composite
def repeated(draw: st.DrawFn, before: StepPlan) -> StepPlan:
    """A plan with the epoch of the one before."""
    other = draw(plans(before.step_no + 1, before.epoch))
    return StepPlan(
        step_no=other.step_no,
        rows=before.rows,
        starts=before.starts + np.int32(1),
        counts=before.counts,
        samples=before.samples,
        block_rows=other.block_rows,
        block_cols=other.block_cols,
        block_ids=other.block_ids,
        shape=other.shape,
        shared_blocks=other.shared_blocks,
        block_groups=other.block_groups,
        trained_rests=other.trained_rests,
        masked=before.masked,
        draw=other.draw,
        captures=other.captures,
        epoch=before.epoch,
    )


@st.composite
def inputs(draw: st.DrawFn) -> StepInputs:
    count, words = draw(st.integers(0, 4)), draw(st.integers(1, 3))
    index = ints(count, SMALL, np.int64)
    bits = ints(count * words, st.integers(0, 2**32 - 1), np.uint32).map(lambda flat: flat.reshape(count, words))
    masks = draw(st.none() | st.builds(Masks, index, bits, st.none() | index))
    return StepInputs(draw(SMALL), masks, tuple(draw(st.lists(tokens(), max_size=4))))


def copies() -> st.SearchStrategy[BlockCopies]:
    return st.integers(0, 5).flatmap(
        lambda count: st.builds(BlockCopies, SMALL, LOCATION, LOCATION, ints(count), ints(count))
    )


def captures() -> st.SearchStrategy[CapturePlan]:
    heads = st.builds(HeadShape, SMALL, st.sampled_from(get_args(Variant)))
    return st.builds(CapturePlan, heads | shapes())


def plain(value: object) -> object:
    """Arrays as lists with their type and shape, so that records can be compared."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        parts = {part.name: plain(getattr(value, part.name)) for part in dataclasses.fields(value)}
        return type(value).__name__, parts
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.shape, value.tolist()
    return [plain(part) for part in value] if isinstance(value, tuple) else value
