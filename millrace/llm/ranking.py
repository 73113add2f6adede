"""Scores of texts by a language model: log-probabilities, and orders of documents that follow from what it can do.

A cross-encoder or a model trained to embed ranks by what it was trained for. For others, what stands in has a name.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from millrace.errors import BadRequest
from millrace.link.messages import TokenLogprobs
from millrace.link.vectors import Float32s

RankingMethod = Literal["embedding", "yes_no"]
_METHODS = (
    "by='embedding' orders by the cosine of the model's embeddings, by='yes_no' by how much likelier the model finds"
    " 'Yes' than 'No' when it is asked whether a document answers the query"
)


@dataclass(frozen=True, slots=True)
class Score:
    """How likely a model finds a text after a prompt."""

    text: str
    logprob: float
    """Natural logarithm of the probability of the whole text."""
    token_logprobs: list[float] = field(default_factory=list, repr=False)

    @property
    def num_tokens(self) -> int:
        return len(self.token_logprobs)

    @property
    def mean_logprob(self) -> float:
        """Per token: compares texts of different lengths."""
        return self.logprob / self.num_tokens


@dataclass(frozen=True, slots=True)
class Ranked:
    """One document of an order, the best first."""

    index: int
    """Its place in the list that was given."""
    document: str
    score: float
    """Of a cross-encoder: mostly from 0 to 1, as its files say. Of embeddings: the cosine, from -1 to 1. by="yes_no":
    the share of "Yes" in "Yes" and "No", from 0 to 1."""


def check_ranking(by: object, documents: object) -> None:
    if by not in ("embedding", "yes_no"):
        asked = "needs to know how" if by is None else f"does not know by={by!r}"
        raise BadRequest(
            f"rerank() {asked}: this model was trained neither to rerank nor to embed. {_METHODS}.", param="by"
        )
    check_documents(documents)


def check_documents(documents: object) -> None:
    if (
        isinstance(documents, str)
        or not isinstance(documents, Sequence)
        or not all(isinstance(document, str) for document in documents)
    ):
        raise BadRequest("documents is not a list of texts.", param="documents")


def score_of(text: str, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs | None]) -> Score:
    """`logprobs`: of a whole prompt whose last tokens are these."""
    found = [entry.logprob for entry in logprobs[len(logprobs) - len(token_ids) :] if entry is not None]
    return Score(text, math.fsum(found), found)


def by_embedding(query: Float32s, documents: Sequence[str], vectors: Sequence[Float32s]) -> list[Ranked]:
    """Vectors have length 1."""
    return ordered(documents, [float(query @ vector) for vector in vectors])


QUESTION = "Document:\n{document}\n\nQuery: {query}\n\nDoes the document answer the query? Answer Yes or No."


def by_answers(documents: Sequence[str], answers: Sequence[tuple[Score, Score]]) -> list[Ranked]:
    """`answers`: the scores of "Yes" and "No" for each document."""
    return ordered(documents, [1 / (1 + math.exp(min(no.logprob - yes.logprob, 700.0))) for yes, no in answers])


def ordered(documents: Sequence[str], scores: Sequence[float]) -> list[Ranked]:
    found = [Ranked(index, *pair) for index, pair in enumerate(zip(documents, scores, strict=True))]
    return sorted(found, key=lambda one: -one.score)
