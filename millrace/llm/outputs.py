"""What `LLM` returns: generations with their choices, and the parts of a stream."""

from __future__ import annotations

from dataclasses import dataclass, field

from millrace.link.messages import TokenLogprobs

MAX_REPR_CHARS = 60


@dataclass(slots=True, repr=False)
class Choice:
    """One answer. `finish_reason` is "stop" or "length"; `stopped_by` is the stop string or end token id, if any."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str = ""
    stopped_by: str | int | None = None
    logprobs: list[TokenLogprobs] | None = None

    def __repr__(self) -> str:
        return (
            f"Choice(index={self.index}, text={_shortened(self.text)}, num_tokens={len(self.token_ids)},"
            f" finish_reason={self.finish_reason!r}, stopped_by={self.stopped_by!r})"
        )


@dataclass(slots=True, repr=False)
class Generation:
    """All answers to one prompt."""

    prompt_token_ids: list[int]
    choices: list[Choice]
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    cached_tokens: int = 0

    def __repr__(self) -> str:
        return (
            f"Generation(num_prompt_tokens={len(self.prompt_token_ids)}, cached_tokens={self.cached_tokens},"
            f" choices={self.choices!r})"
        )

    @property
    def text(self) -> str:
        return self.choices[0].text

    @property
    def token_ids(self) -> list[int]:
        return self.choices[0].token_ids


@dataclass(frozen=True, slots=True)
class StreamPart:
    """One token of a stream and the text it added, which is empty while text is held back for a stop string or an
    incomplete character. The last part of a choice has no token and carries the finished choice."""

    index: int
    text: str
    token_id: int | None = None
    choice: Choice | None = None


def _shortened(text: str) -> str:
    return repr(text if len(text) <= MAX_REPR_CHARS else text[: MAX_REPR_CHARS - 1] + "…")
