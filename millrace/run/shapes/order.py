"""What is captured before steps need it, and in which order: the most used shapes first."""

from __future__ import annotations

from millrace.plan.shapes.declared import Part
from millrace.plan.step import HeadShape, StepShape
from millrace.run.settings import PLACES
from millrace.run.shapes.table import ADAPTED, ShapeTable

FIRST_TOKENS = 128
"""Kernels for prompts of up to this many tokens are compiled before the engine reports that it is ready."""


def capture_order(table: ShapeTable) -> list[Part]:
    """Everything that is captured while the engine is idle, in order. Nothing if the runner has no graphs."""
    facts = table.facts
    if not facts.can_capture:
        return []
    placed = placed_shapes(table) if facts.has_drafts else []
    bodies = [*placed, *_hot_bodies(table)] if facts.takes_adapters else []
    adapted = [table.with_adapters(shape, changes) for changes in ADAPTED for shape in bodies]
    return [*placed, *_usual(table), *adapted, *table.first_chunks()]


def first_request_parts(table: ShapeTable) -> list[Part]:
    """The bodies and the head of a short first request."""
    prompts = [shape for shape in table.all_mixed() if shape.tokens <= FIRST_TOKENS]
    return [table.decode(1), HeadShape(1, "greedy"), *prompts]


def build_order(table: ShapeTable) -> list[Part]:
    """Everything whose kernels are compiled in advance: what is captured, and heads of all sizes. Without long rows:
    cuDNN would spend a second on preparing them, and other shapes use almost all of their kernels."""
    if not table.facts.can_capture:
        return []
    heads: list[Part] = [HeadShape(size, "full") for size in table.decode_sizes]
    short = [part for part in capture_order(table) if isinstance(part, HeadShape) or not table.key_of(part).long_from]
    return list(dict.fromkeys(short + heads))


def placed_shapes(table: ShapeTable) -> list[StepShape]:
    """Decode shapes with drafts, for the common sizes."""
    return [
        table.decode(size, places=places)
        for size in _hot_sizes(table)
        for places in PLACES
        if table.has_places(size, places)
    ]


def _hot_sizes(table: ShapeTable) -> list[int]:
    return [size for size in table.decode_sizes if size in table.facts.sizes.hot_decode]


def _hot_bodies(table: ShapeTable) -> list[StepShape]:
    """The bodies that most steps run at."""
    return [*(table.decode(size) for size in _hot_sizes(table)), *table.all_mixed()]


def _usual(table: ShapeTable) -> list[Part]:
    """All bodies except drafts and chunks of long prompts, and the heads."""
    hot = _hot_sizes(table)
    rest = [size for size in table.decode_sizes if size not in table.facts.sizes.hot_decode]

    def decode(size: int) -> list[Part]:
        return [table.decode(size), HeadShape(size, "greedy")]

    def sharing(sizes: list[int]) -> list[Part]:
        if not table.facts.can_share_prefix:
            return []
        return [table.decode(size, key=table.sharing) for size in sizes if size >= table.facts.sizes.min_sharing_rows]

    # Graphs take memory and time, so drawing from logits is captured only for the common sizes and for those missed.
    first = [part for size in hot for part in (*decode(size), HeadShape(size, "full"))]
    first += [*table.all_mixed(), *sharing(hot)]
    return first + [part for size in rest for part in decode(size)] + table.all_split() + sharing(rest)
