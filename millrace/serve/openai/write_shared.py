"""The `usage` of chat and completions."""

from __future__ import annotations

from msgspec import UNSET, UnsetType

from millrace.serve.generate import usage as internal
from millrace.serve.generate.job import Job
from millrace.serve.openai.answers import PromptTokensDetails, Usage


def usage_of(counts: internal.Usage) -> Usage:
    details = PromptTokensDetails(counts.cached_tokens)
    return Usage(counts.prompt_tokens, counts.output_tokens, counts.total_tokens, details)


def running_usage(job: Job) -> Usage | UnsetType | None:
    """The `usage` of a chunk that is not the last: the counts so far, null, or no such field."""
    if job.generation.continuous_usage:
        return usage_of(job.usage())
    return None if job.generation.include_usage else UNSET
