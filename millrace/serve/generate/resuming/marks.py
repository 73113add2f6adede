"""Between a choice and its stream: names the token ids of each frame, and holds back what the client has already.

Server-sent events have them in a comment before the frame, `: tokens 17 4`, or `: tokens/1 17 4` for choice 1. Lines of
JSON have no comments: there they are the field `millrace_tokens`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from millrace.link.messages import Finish, TokenLogprobs
from millrace.params.sampling import SamplingParams


class FrameSink(Protocol):
    def send(self, frames: bytes) -> None: ...


class TokenSink(Protocol):
    """What a choice does with its tokens."""

    def on_token(self, token_id: int, logprobs: TokenLogprobs | None) -> None: ...

    def on_prompt_logprobs(self, logprobs: tuple[TokenLogprobs | None, ...]) -> None: ...

    def on_finish(self, finish: Finish) -> None: ...


class MarkedFrames:
    """All frames of a token are sent together, so that a stream seldom breaks off between them."""

    def __init__(self, out: FrameSink, index: int, *, has_comments: bool) -> None:
        self._out = out
        self._name = b": tokens" if index == 0 else b": tokens/%d" % index
        self._end = b": end %d\n" % index if has_comments else b""
        self._has_comments = has_comments
        self._ids: list[int] = []
        self._frames: list[bytes] = []
        self.is_muted = False
        """True while frames are made that the client has."""

    def send(self, frames: bytes) -> None:
        if frames:
            self._frames.append(frames)

    def add(self, token_id: int) -> None:
        self._ids.append(token_id)

    def flush(self) -> None:
        """Send what the last token gave. Ids without a frame wait for the next one."""
        if not self._frames:
            return
        frames, ids = b"".join(self._frames), self._ids
        self._frames, self._ids = [], []
        if not self.is_muted:
            self._out.send(self._marked(frames, ids) if ids else frames)

    def _marked(self, frames: bytes, ids: list[int]) -> bytes:
        if self._has_comments:
            return b"%b %b\n%b" % (self._name, b" ".join(b"%d" % one for one in ids), frames)
        return b'{"millrace_tokens":[%b],%b' % (b",".join(b"%d" % one for one in ids), frames[1:])

    def send_last(self, frames: bytes) -> None:
        """Send the last frames of the choice, with those that were not sent yet."""
        frames = b"".join((*self._frames, frames))
        self._frames = [self._end + frames] if frames else []
        self.flush()


def replay(sink: TokenSink, prompt_ids: Sequence[int], token_ids: Sequence[int], params: SamplingParams) -> None:
    """Give a choice the tokens that its client has. Only the ids of their log-probabilities matter: they count text."""

    def scored(token_id: int) -> TokenLogprobs:
        return TokenLogprobs(token_id, 0.0, 1, (), ())

    if params.prompt_logprobs is not None:
        sink.on_prompt_logprobs((None, *map(scored, prompt_ids[1:])))
    for token_id in token_ids:
        sink.on_token(token_id, None if params.logprobs is None else scored(token_id))


class MarkedSink:
    """The sink of a choice whose frames go through marks."""

    def __init__(self, choice: TokenSink, frames: MarkedFrames) -> None:
        self._choice = choice
        self._frames = frames

    def on_token(self, token_id: int, logprobs: TokenLogprobs | None) -> None:
        self._frames.add(token_id)
        self._choice.on_token(token_id, logprobs)
        self._frames.flush()

    def on_prompt_logprobs(self, logprobs: tuple[TokenLogprobs | None, ...]) -> None:
        self._choice.on_prompt_logprobs(logprobs)

    def on_finish(self, finish: Finish) -> None:
        self._choice.on_finish(finish)
