"""Scores of pairs of texts: from a cross-encoder, which reads both, or as the cosine of their embeddings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from millrace.errors import BadRequest
from millrace.link.front.limits import text_too_long
from millrace.link.vectors import Float32s, sparse_of
from millrace.params.draws import Pooling
from millrace.serve.encode.token_texts import TokenTexts, known_prompt, role_inputs
from millrace.serve.generate.checks import name_fields
from millrace.serve.generate.generation import Prompt
from millrace.serve.generate.vectors import check_num_inputs, encode_inputs, encoded_inputs, pooling_of, text_room
from millrace.serve.state import FrontState
from millrace.sources.encoders.encoder_files import PairForm, ScoreActivation
from millrace.sources.encoders.retrieval_files import MultiForm
from millrace.text.tokenizers.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Texts:
    """One side of pairs, and the request's name of it."""

    texts: list[str]
    field: str


Encoded = tuple[Float32s, list[int]]
"""What the engine gave for a text, and the text's tokens."""
Compare = Callable[[Encoded, Encoded], float]


def compare_cosine(query: Encoded, document: Encoded) -> float:
    return cosine(query[0], document[0])


def compare_sparse(query: Encoded, document: Encoded) -> float:
    return sparse_of(query[0]).dot(sparse_of(document[0]))


def compare_tokens(form: MultiForm, tokenizer: Tokenizer) -> Compare:
    texts = TokenTexts(form, tokenizer)

    def compare(query: Encoded, document: Encoded) -> float:
        return texts.similarity(texts.kept(*query, "query"), texts.kept(*document, "document"))

    return compare


@dataclass(frozen=True, slots=True)
class PairScores:
    """What the engine computes for some pairs, and how scores follow from it."""

    prompts: list[Prompt]
    pooling: Pooling
    activation: ScoreActivation | None
    """Of a cross-encoder, whose prompts are the pairs; None: prompts are single texts."""
    label: int
    """Of a cross-encoder: index of the class that is the score."""
    pairs: list[tuple[int, int]]
    """Indices of the prompts of each pair of an embedder."""
    compare: Compare

    def scores(self, vectors: Sequence[Float32s]) -> list[float]:
        if self.activation is not None:
            return [float(activated(vector, self.activation)[self.label]) for vector in vectors]
        sides = [(vector, prompt.token_ids) for vector, prompt in zip(vectors, self.prompts, strict=True)]
        return [self.compare(sides[first], sides[second]) for first, second in self.pairs]


async def score_pairs(
    state: FrontState, first: Texts, second: Texts, *, may_cut: bool, max_second: int | None = None
) -> PairScores:
    """Each first text with its second one, or one first text with all second ones. `max_second`: tokens of a second
    text that are kept."""
    check_num_inputs(second.texts, second.field)
    if len(first.texts) not in (1, len(second.texts)):
        raise BadRequest(
            f"'{first.field}' holds {len(first.texts)} texts and '{second.field}' {len(second.texts)}; send one first"
            " text, or as many as second ones.",
            param=first.field,
        )
    encoder = state.encoder
    if encoder is not None and encoder.pair is not None:
        prompts = await _joined_texts(state, encoder.pair, first, second, may_cut=may_cut, max_second=max_second)
        return PairScores(prompts, "model", encoder.activation, encoder.pair.label, [], compare_cosine)
    if encoder is not None and encoder.ranks:
        prompts = await _joined(state, first, second, may_cut=may_cut, max_second=max_second)
        return PairScores(prompts, "model", encoder.activation, 0, [], compare_cosine)
    if encoder is None or encoder.task in ("classify", "tag"):
        what = "writes text" if encoder is None else f"has {len(encoder.labels)} classes"
        raise BadRequest(
            f"The model {state.model_name!r} {what}; scores of pairs need a cross-encoder (one logit) or a model for"
            " embeddings. Serve one beside it.",
            param="model",
            code="unsupported_model",
        )
    if max_second is not None:
        raise BadRequest(
            "'max_tokens_per_doc' needs a cross-encoder; send 'truncate' instead.", param="max_tokens_per_doc"
        )
    if encoder.multi is not None:
        form = encoder.multi
        firsts = await role_inputs(state, form, first.texts, first.field, "query", may_cut=may_cut)
        seconds = await role_inputs(state, form, second.texts, second.field, "document", may_cut=may_cut)
        compare = compare_tokens(form, state.tokenizer)
        return PairScores([*firsts, *seconds], "model", None, 0, _pairs(len(firsts), len(seconds)), compare)
    firsts = await encoded_inputs(
        state, first.texts, first.field, may_cut=may_cut, prompt_name=known_prompt(encoder.prompts.by_name, "query")
    )
    name = known_prompt(encoder.prompts.by_name, "document", "passage", "corpus")
    seconds = await encoded_inputs(state, second.texts, second.field, may_cut=may_cut, prompt_name=name)
    compare = compare_sparse if encoder.task == "sparse" else compare_cosine
    pairs = _pairs(len(firsts), len(seconds))
    return PairScores([*firsts, *seconds], pooling_of(state), None, 0, pairs, compare)


def _pairs(num_first: int, num_second: int) -> list[tuple[int, int]]:
    """Indices of both texts of each pair, where all second texts follow all first ones."""
    return [(index if num_first > 1 else 0, num_first + index) for index in range(num_second)]


async def _joined_texts(
    state: FrontState, form: PairForm, first: Texts, second: Texts, *, may_cut: bool, max_second: int | None
) -> list[Prompt]:
    """Both texts of each pair in one text, as the model's files say."""
    if max_second is not None:
        message = "'max_tokens_per_doc' needs a model that reads two texts; send 'truncate' instead."
        raise BadRequest(message, param="max_tokens_per_doc")
    firsts = first.texts if len(first.texts) > 1 else first.texts * len(second.texts)
    texts = [form.joined(*pair) for pair in zip(firsts, second.texts, strict=True)]
    return await encoded_inputs(state, texts, second.field, may_cut=may_cut)


async def _joined(
    state: FrontState, first: Texts, second: Texts, *, may_cut: bool, max_second: int | None
) -> list[Prompt]:
    """Both texts of each pair in one prompt, as the tokenizer joins them."""
    is_cut = may_cut or max_second is not None
    firsts = await encode_inputs(state, first.texts, first.field, add_special=False, may_cut=may_cut)
    seconds = await encode_inputs(state, second.texts, second.field, add_special=False, may_cut=is_cut)
    for side, encoded in ((first, firsts), (second, seconds)):
        if [] in encoded:
            number = encoded.index([])
            raise BadRequest(
                f"Text {number} of '{side.field}' has no tokens; send at least one character.", param=side.field
            )
    template, room = state.tokenizer.pair, text_room(state)
    prompts = []
    for index, other in enumerate(seconds):
        own = firsts[index if len(firsts) > 1 else 0]
        kept = other if max_second is None else other[:max_second]
        one, two = fitted(own, kept, room - template.num_added) if may_cut else (own, kept)
        token_ids, second_from = template.join(one, two)
        if len(token_ids) > room:
            error = text_too_long(len(token_ids), state.require_engine())
            raise name_fields(error, {"prompt": second.field}) from None
        dropped = len(own) + len(other) - len(one) - len(two)
        prompts.append(Prompt(token_ids, None, dropped, second_from=second_from))
    return prompts


def fitted(first: list[int], second: list[int], room: int) -> tuple[list[int], list[int]]:
    """Both without the ends that do not fit: of the longer one as far as possible."""
    least = room // 2
    num_first = min(len(first), max(least, room - len(second)))
    return first[:num_first], second[: room - num_first]


def cosine(first: Float32s, second: Float32s) -> float:
    lengths = float(np.linalg.norm(first) * np.linalg.norm(second))
    return float(first @ second) / lengths if lengths else 0.0


def activated(logits: Float32s, activation: ScoreActivation) -> Float32s:
    """Scores of the last axis."""
    if activation == "identity":
        return logits
    if activation == "sigmoid":
        return (1.0 / (1.0 + np.exp(-logits.astype(np.float64)))).astype(np.float32)
    powers = np.exp(logits.astype(np.float64) - logits.max(axis=-1, keepdims=True))
    shares: Float32s = (powers / powers.sum(axis=-1, keepdims=True)).astype(np.float32)
    return shares
