"""Requests whose result is a vector: the pooled hidden state of a prompt."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from millrace.errors import BadRequest, RequestFailed
from millrace.link.caller import ANONYMOUS, Caller
from millrace.link.client import EngineClient
from millrace.link.messages import Finish, TokenLogprobs
from millrace.params.draws import Pooling
from millrace.params.sampling import SamplingParams

Float32s = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Embedding:
    vector: Float32s
    """Of length 1, unless an encoder gives another or logits."""
    prompt_tokens: int
    cached_tokens: int


class VectorRequest:
    """Submits one prompt; `done` resolves to its embedding."""

    def __init__(
        self,
        client: EngineClient,
        token_ids: list[int],
        pooling: Pooling,
        caller: Caller = ANONYMOUS,
        *,
        second_from: int = 0,
        pooled_from: int = 0,
        attended: int = 0,
    ) -> None:
        """`second_from`, `pooled_from` and `attended`: as in `DrawParams`."""
        if not token_ids:
            raise BadRequest("An input has no tokens; nothing can be embedded.", param="input")
        self._client = client
        self.done: asyncio.Future[Embedding] = asyncio.get_running_loop().create_future()
        params = SamplingParams(
            temperature=0.0,
            max_tokens=0,
            pooling=pooling,
            second_from=second_from,
            pooled_from=pooled_from,
            attended=attended,
        )
        self._request_id = client.submit(token_ids, params, self, caller=caller)

    def cancel(self) -> None:
        """Abort the request unless it has finished."""
        if not self.done.done():
            self._client.abort(self._request_id)

    def on_token(self, token_id: int, logprobs: TokenLogprobs | None) -> None: ...

    def on_prompt_logprobs(self, logprobs: tuple[TokenLogprobs | None, ...]) -> None: ...

    def on_finish(self, finish: Finish) -> None:
        if self.done.done():
            return
        if finish.vector:
            vector = np.frombuffer(finish.vector, np.float32)
            self.done.set_result(Embedding(vector, finish.prompt_tokens, finish.cached_tokens))
        else:
            self.done.set_exception(RequestFailed(finish.message or f"The request ended early: {finish.reason}."))


@dataclass(frozen=True, slots=True)
class SparseVector:
    """Weights of tokens of the vocabulary; all others are 0."""

    indices: npt.NDArray[np.int32]
    """Token ids, ascending."""
    values: Float32s

    def largest(self, count: int | None) -> SparseVector:
        """Only the so many largest weights; None: all."""
        if count is None or count >= len(self.values):
            return self
        kept = np.sort(np.argsort(-self.values, kind="stable")[:count])
        return SparseVector(self.indices[kept], self.values[kept])

    def dot(self, other: SparseVector) -> float:
        _, own, theirs = np.intersect1d(self.indices, other.indices, assume_unique=True, return_indices=True)
        return float(self.values[own] @ other.values[theirs])


def sparse_of(packed: Float32s) -> SparseVector:
    """What an encoder's head packs into one array: the number of weights and their token ids as int32, the weights."""
    count = int(packed[:1].view(np.int32)[0])
    return SparseVector(packed[1 : count + 1].view(np.int32), packed[count + 1 :])


def max_similarity(query: Float32s, document: Float32s, *, takes_mean: bool) -> float:
    """MaxSim of vectors [tokens, width]: of each query token the best match, summed or averaged."""
    if not len(query) or not len(document):
        return 0.0
    best = (query @ document.T).max(axis=1)
    return float(best.mean() if takes_mean else best.sum())


def shortened(vector: Float32s, dimensions: int | None) -> Float32s:
    """The first dimensions, again of length 1: for models that were trained so that these say most."""
    if dimensions is None or dimensions == len(vector):
        return vector
    if not 1 <= dimensions <= len(vector):
        raise BadRequest(
            f"dimensions is {dimensions}; this model's vectors have {len(vector)}, so it must be between 1 and that.",
            param="dimensions",
        )
    cut = vector[:dimensions]
    length = float(np.linalg.norm(cut))
    return cut / np.float32(length) if length else cut
