"""The one internal request: what every API's body is translated into, before anything is generated."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from millrace.link.client import ANYONE, Caller
from millrace.params import SamplingParams


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt as the engine reads it."""

    token_ids: list[int]
    text: str | None
    """What the client wrote, for `echo`; None where it sent token ids."""
    num_dropped: int = 0
    """Tokens cut off its beginning, because the client asked for that."""


@dataclass(frozen=True, slots=True)
class Generation:
    """One HTTP request's work: each prompt gets `num_sequences` sequences, of which `n` are returned."""

    prompts: list[Prompt]
    params: SamplingParams
    """Of the first choice; choice i has its seed plus i."""
    answer_id: str
    deadline: float
    """On `time.monotonic`."""
    n: int = 1
    num_sequences: int = 1
    """More than n when the likeliest n of them are returned (`best_of`)."""
    priority: int = 1
    cache_salt: str = ""
    stream: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
    logprobs: int | None = None
    """How many likeliest tokens the client wants to see at each output token; None: no log-probabilities at all."""
    prompt_logprobs: bool = False
    echo: bool = False
    score_only: bool = False
    """Nothing of the output is wanted: the prompt's own log-probabilities are (`echo` with `max_tokens` 0)."""
    return_token_ids: bool = False
    reports_dropped: bool = False
    """The client allowed its prompt to be cut (`truncate_prompt_tokens`) and is told how much was."""
    writes_details: bool = False
    """The API's chunks need more than a text between two constants."""
    holds_end: bool = False
    """A stream's last frames come from whoever waits for the job, who has something to do before them."""
    caller: Caller = ANYONE
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def is_detailed(self) -> bool:
        """Whether a streamed chunk carries more than its text."""
        return (
            self.logprobs is not None
            or self.continuous_usage
            or self.return_token_ids
            or self.echo
            or self.prompt_logprobs
            or self.reports_dropped
            or self.writes_details
        )
