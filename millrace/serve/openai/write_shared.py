"""The `usage` of chat and completions."""

from __future__ import annotations

from msgspec import UNSET, UnsetType

from millrace.serve.generate import events as internal
from millrace.serve.generate.choices import CollectedChoice
from millrace.serve.generate.choosing.best import best, elect
from millrace.serve.generate.generation import Generation
from millrace.serve.generate.job import Job
from millrace.serve.openai.answers import CompletionTokensDetails, PromptTokensDetails, Usage, VoteResult


def usage_of(counts: internal.Usage, *, reasons: bool = False) -> Usage:
    """`reasons`: the model reasons, so that the number of reasoning tokens is of interest."""
    placed = counts.document_tokens
    details = PromptTokensDetails(counts.cached_tokens, UNSET if placed is None else placed)
    further: CompletionTokensDetails | UnsetType = UNSET
    if counts.predicted_tokens:
        rejected = counts.predicted_tokens - counts.predicted_accepted
        further = CompletionTokensDetails(counts.reasoning_tokens, counts.predicted_accepted, rejected)
    elif reasons:
        further = CompletionTokensDetails(counts.reasoning_tokens)
    return Usage(counts.prompt_tokens, counts.output_tokens, counts.total_tokens, details, further)


def reasons(job: Job) -> bool:
    form = job.generation.form
    return form is not None and form.reasoning is not None


def chosen(
    choices: list[CollectedChoice], generation: Generation
) -> tuple[list[CollectedChoice], VoteResult | UnsetType]:
    """The choices to return, and how they were voted on."""
    if generation.vote is None:
        return best(choices, generation), UNSET
    winner, ballot = elect(choices, generation.vote)
    return [winner], VoteResult(ballot.value, ballot.votes, ballot.samples, ballot.has_majority)


def running_usage(job: Job) -> Usage | UnsetType | None:
    """The `usage` of a chunk that is not the last: the counts so far, null, or no such field."""
    if job.generation.continuous_usage:
        return usage_of(job.usage(), reasons=reasons(job))
    return None if job.generation.include_usage else UNSET
