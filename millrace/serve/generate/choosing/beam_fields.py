"""Beam search and votes as fields of a body."""

from __future__ import annotations

from typing import Annotated, Literal

from millrace.errors import BadRequest
from millrace.params import MAX_CHOICES, MAX_LOGPROBS, BeamParams
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


def beam_params(body: BeamFields, n: int, best_of: int | None) -> BeamParams | None:
    """None without beam search."""
    width, other = body.num_beams, body.beam_width
    if width is not None and other is not None and width != other:
        raise BadRequest(
            f"num_beams is {width} and beam_width is {other}; they are the same, send one of them.", param="num_beams"
        )
    width = width if width is not None else other
    if body.use_beam_search is False or (body.use_beam_search is None and (width or 1) == 1):
        _refuse_alone(body)
        return None
    return BeamParams(
        width if width is not None else best_of or n,
        1.0 if body.length_penalty is None else body.length_penalty,
        False if body.early_stopping is None else body.early_stopping,
    )


def _refuse_alone(body: BeamFields) -> None:
    if body.length_penalty not in (None, 1.0):
        raise BadRequest(
            f"length_penalty is {body.length_penalty}, which needs beam search; set num_beams or use_beam_search.",
            param="length_penalty",
        )
    if body.early_stopping not in (None, False):
        raise BadRequest(
            "early_stopping needs beam search; set num_beams or use_beam_search, or remove it.", param="early_stopping"
        )
