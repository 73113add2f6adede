"""Documents of a request: what the engine must be able to do, and the requests that compute them alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from millrace.errors import BadRequest
from millrace.link.messages import EngineReady, Finish, TokenLogprobs
from millrace.params.keeping import Documents
from millrace.params.sampling import SamplingParams


class _Unread:
    """Nobody reads what the request gives: its keys and values stay cached."""

    def on_token(self, token_id: int, logprobs: TokenLogprobs | None) -> None: ...

    def on_prompt_logprobs(self, logprobs: tuple[TokenLogprobs | None, ...]) -> None: ...

    def on_finish(self, finish: Finish) -> None: ...


UNREAD = _Unread()


def check_documents(documents: Documents, params: SamplingParams, ready: EngineReady, *, has_handle: bool) -> None:
    why = ready.no_documents
    if not why and params.prompt_logprobs is not None:
        why = "log-probabilities of the prompt need every token of it computed"
    if not why and has_handle:
        why = "a prompt that is kept cached (a session, a handle, prompt_cache_retention, cache_control) must be exact"
    if why:
        raise BadRequest(
            f"Parts of this request are marked as documents, but {why}. Remove 'cache' from them.",
            param="cache",
            code="unsupported_parameter",
        )


def texts_alone(documents: Documents, token_ids: Sequence[int], block_size: int) -> Iterator[Sequence[int]]:
    """The tokens of each document that fill whole blocks, with one more where there is one: a text whose blocks are all
    cached then has a single token left to compute."""
    seen = set()
    for span in documents.spans:
        num_whole = (span.end - span.start) // block_size * block_size
        text = tuple(token_ids[span.start : min(span.end, span.start + num_whole + 1)])
        if num_whole and text not in seen:
            seen.add(text)
            yield text


def params_alone(adapter: str) -> SamplingParams:
    """Of the request for such a text."""
    return SamplingParams(temperature=0.0, max_tokens=0, pooling="last", adapter=adapter)
