"""The internal form of a request, into which every dialect translates its bodies."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from millrace.link.caller import ANONYMOUS, Caller
from millrace.params.beams import BeamParams
from millrace.params.keeping import Documents, Retain
from millrace.params.sampling import SamplingParams
from millrace.serve.generate.choosing.beam_fields import SelfConsistency
from millrace.serve.generate.fields.session import Turn
from millrace.serve.generate.resuming.request import NOTHING, Received, Resumable
from millrace.serve.http.ids import new_id
from millrace.text.answer_parser import AnswerForm


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt as token ids."""

    token_ids: list[int]
    text: str | None
    """The client's text, for `echo`; None if it sent token ids."""
    num_dropped: int = 0
    """Tokens cut from its beginning (`truncate_prompt_tokens`)."""
    opens_reasoning: bool = False
    """The chat template has opened the model's reasoning."""
    closes_reasoning: bool = False
    """The chat template has written an empty reasoning: the answer begins at once."""
    rendered: str = ""
    """The text of the token ids, where a session needs it."""
    documents: Documents | None = None
    """Parts of a conversation that the client marked."""
    second_from: int = 0
    """As in `DrawParams`, like `pooled_from` and `attended`."""
    pooled_from: int = 0
    attended: int = 0


@dataclass(frozen=True, slots=True)
class Generation:
    """Each prompt gets `num_sequences` sequences, of which `n` are returned."""

    prompts: list[Prompt]
    params: SamplingParams
    """Parameters of the first choice; choice i adds i to the seed."""
    answer_id: str
    deadline: float
    """On `time.monotonic`."""
    n: int = 1
    num_sequences: int = 1
    """More than `n` with `best_of`: the likeliest `n` are returned."""
    vote: SelfConsistency | None = None
    """Return one of the answers that agree; `num_sequences` are generated."""
    beams: BeamParams | None = None
    """Search with beams instead of drawing tokens."""
    asked_priority: int | None = None
    """The class that the client named; None: the tenant's usual one."""
    priority: int = 1
    """Set at the gate, like `caller`."""
    cache_salt: str = ""
    turn: Turn | None = None
    """Of a session, which the answer is added to."""
    retain: Retain | None = None
    """Keep the prompt cached for a time. Its quota is set at the gate."""
    stream: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
    logprobs: int | None = None
    """Number of likeliest tokens to report per output token; None: no log-probabilities."""
    prompt_logprobs: bool = False
    echo: bool = False
    score_only: bool = False
    """Only the prompt's log-probabilities are wanted (`echo` with `max_tokens` 0)."""
    return_token_ids: bool = False
    reports_dropped: bool = False
    """Report how many prompt tokens were cut (`truncate_prompt_tokens`)."""
    writes_details: bool = False
    """The dialect's frames are more than text between two constants."""
    holds_end: bool = False
    """The last frames of a stream are sent by `Work.conclude`, which has something to do before them."""
    format_field: str = "grammar"
    """The request's field that set `params.grammar`."""
    form: AnswerForm | None = None
    """Reasoning and tool calls to look for; None: the answer is text."""
    caller: Caller = ANONYMOUS
    resumable: Resumable | None = None
    """Set for streams that a gateway may continue on another replica."""
    created: int = field(default_factory=lambda: int(time.time()))

    def part_id(self, index: int, prefix: str, number: int) -> str:
        """Id of a numbered part of choice `index`, such as a tool call."""
        return new_id(prefix) if self.resumable is None else self.resumable.id_of(prefix, index, number)

    def received_by(self, index: int) -> Received:
        """What the client has of choice `index` from another replica."""
        before = self.resumable.received if self.resumable is not None else None
        return before[index] if before else NOTHING

    @property
    def is_detailed(self) -> bool:
        """True if a streamed frame carries more than text."""
        return (
            self.logprobs is not None
            or self.continuous_usage
            or self.return_token_ids
            or self.echo
            or self.prompt_logprobs
            or self.reports_dropped
            or self.writes_details
            or self.resumable is not None
        )
