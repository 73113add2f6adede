"""Beam search and votes as fields of a body."""

from __future__ import annotations

from typing import Annotated, Literal

from millrace.errors import BadRequest
from millrace.params.beams import BeamParams
from millrace.params.sampling import MAX_CHOICES, MAX_LOGPROBS
from millrace.serve.generate.checks import name_fields
from millrace.serve.generate.choosing.sampler_fields import SamplerFields
from millrace.serve.http.schema import Strict, described


class SelfConsistency(Strict, kw_only=True):
    """Generate several answers and return one of those that agree with the most others in one extracted field."""

    samples: Annotated[int, described("Answers to generate.", minimum=2, maximum=MAX_CHOICES)]
    regex: Annotated[
        str | None,
        described("Extracts the field: its first group, or all of it; the last match counts.", maxLength=1000),
    ] = None
    json_path: Annotated[
        str | None, described("Extracts the field of a JSON answer, such as `result.items[0].price`.", maxLength=1000)
    ] = None


class BeamFields(SamplerFields, kw_only=True):
    use_beam_search: Annotated[
        bool | None,
        described("Search with beams; without `num_beams` there are `best_of`, else `n` of them."),
    ] = None
    num_beams: Annotated[
        int | None, described("Number of beams; above 1 it turns the search on.", minimum=1, maximum=MAX_LOGPROBS)
    ] = None
    beam_width: Annotated[int | None, described("Another name of `num_beams`.", minimum=1, maximum=MAX_LOGPROBS)] = None
    length_penalty: Annotated[
        float | None, described("Beams are scored by sum / length ** this; default 1.", minimum=-100, maximum=100)
    ] = None
    early_stopping: Annotated[
        bool | Literal["never"] | None,
        described('true: end with the first `num_beams` finished ones; "never": only if none can become better.'),
    ] = None


def beam_params(body: BeamFields, n: int, best_of: int | None, vote: SelfConsistency | None) -> BeamParams | None:
    """None without beam search."""
    name, width = _width(body)
    if body.use_beam_search is False or (body.use_beam_search is None and width in (None, 1)):
        _refuse_alone(body, name, width)
        return None
    if vote is not None:
        raise BadRequest(
            "'self_consistency' draws its answers and beam search does not draw; remove one of them.",
            param="self_consistency",
        )
    if width is None:
        name, width = ("n", n) if best_of is None else ("best_of", best_of)
    elif best_of not in (None, width):
        raise BadRequest(
            f"best_of is {best_of} and {name} is {width}; with beam search they are the same, send one of them.",
            param="best_of",
        )
    try:
        return BeamParams(
            width,
            1.0 if body.length_penalty is None else body.length_penalty,
            False if body.early_stopping is None else body.early_stopping,
        )
    except BadRequest as error:
        raise name_fields(error, {"num_beams": name}) from None


def _width(body: BeamFields) -> tuple[str, int | None]:
    """The number of beams that was sent, and the field that it was sent in."""
    width, other = body.num_beams, body.beam_width
    if width is not None and other is not None and width != other:
        raise BadRequest(
            f"num_beams is {width} and beam_width is {other}; they are the same, send one of them.", param="num_beams"
        )
    return ("num_beams", width) if other is None else ("beam_width", other)


def _refuse_alone(body: BeamFields, name: str, width: int | None) -> None:
    if width not in (None, 1):
        raise BadRequest(f"{name} is {width}, but use_beam_search is false; remove one of them.", param=name)
    if body.length_penalty not in (None, 1.0):
        raise BadRequest(
            f"length_penalty is {body.length_penalty}, which needs beam search; set num_beams or use_beam_search.",
            param="length_penalty",
        )
    if body.early_stopping not in (None, False):
        raise BadRequest(
            "early_stopping needs beam search; set num_beams or use_beam_search, or remove it.", param="early_stopping"
        )
