"""POST /v1/completions: its body translated into work."""

from __future__ import annotations

from millrace.errors import BadRequest
from millrace.params.defaults import NEUTRAL_DEFAULTS
from millrace.serve.generate.checks import MAX_SEQUENCES, check_logprobs, check_num_sequences
from millrace.serve.generate.choosing.beam_fields import beam_params
from millrace.serve.generate.fields.priority import priority_of
from millrace.serve.generate.generation import Generation, Prompt
from millrace.serve.generate.prompts import check_truncation, cut_prompt, encode_texts, fill_in_prompts
from millrace.serve.generate.sampling import complete, deadline_of, salt_of, sampling_params
from millrace.serve.generate.work import Work
from millrace.serve.http.body import BodyDecoder
from millrace.serve.http.ids import new_id
from millrace.serve.http.inputs import texts_or_tokens
from millrace.serve.openai.formats import format_wanted
from millrace.serve.openai.schemas import CompletionRequest
from millrace.serve.openai.translate_shared import check_fields, sequences_of, shared_sampling, usage_options
from millrace.serve.openai.write_completions import CompletionWriter
from millrace.serve.state import FrontState

DEFAULT_MAX_TOKENS = 16
"""OpenAI's default for this endpoint."""

_decoder = BodyDecoder(CompletionRequest)


async def prepare_completion(state: FrontState, body: bytes, received: float, owner: str) -> Work:
    request = _decoder.decode(body)
    state = await state.for_model(request.model)
    await state.await_engine(request.model)
    return Work(state, await _generation(state, request, received), CompletionWriter)


async def _generation(state: FrontState, request: CompletionRequest, received: float) -> Generation:
    check_fields(request)
    check_truncation(request.truncate_prompt_tokens)
    echo = bool(request.echo)
    max_tokens = DEFAULT_MAX_TOKENS if request.max_tokens is None else request.max_tokens
    score_only = echo and max_tokens == 0
    if score_only and request.min_tokens:
        raise BadRequest(
            f"min_tokens is {request.min_tokens}, above max_tokens (0); remove min_tokens.", param="min_tokens"
        )
    n = 1 if request.n is None else request.n
    beams = beam_params(request, n, request.best_of, request.self_consistency)
    best_of = n if beams is not None else sequences_of(request, n)
    _check_logprobs(request)
    wanted = format_wanted(request)
    params = sampling_params(
        state.sampling_defaults if beams is None else NEUTRAL_DEFAULTS,
        **shared_sampling(request),
        n=request.n,
        max_tokens=max_tokens,
        # best_of ranks by the log-probability of the tokens that were chosen.
        logprobs=0 if best_of > n and request.logprobs is None else request.logprobs,
        prompt_logprobs=_prompt_logprobs(request, echo, score_only),
        grammar=wanted.grammar if wanted is not None else None,
    )
    prompts = await _prompts(state, request, best_of, max_tokens)
    include_usage, continuous_usage = usage_options(request)
    return Generation(
        prompts=prompts,
        params=await complete(state, params),
        answer_id=new_id("cmpl-"),
        deadline=deadline_of(request.timeout, state.config, received),
        n=n,
        num_sequences=best_of,
        vote=request.self_consistency,
        beams=beams,
        asked_priority=priority_of(request.priority),
        cache_salt=salt_of(request.cache_salt),
        stream=bool(request.stream),
        include_usage=include_usage,
        continuous_usage=continuous_usage,
        logprobs=request.logprobs,
        prompt_logprobs=request.prompt_logprobs is not None,
        echo=echo,
        score_only=score_only,
        return_token_ids=bool(request.return_token_ids),
        reports_dropped=request.truncate_prompt_tokens is not None,
        format_field=wanted.field if wanted is not None else "",
    )


def _check_logprobs(request: CompletionRequest) -> None:
    check_logprobs("logprobs", request.logprobs)
    check_logprobs("prompt_logprobs", request.prompt_logprobs)


def _prompt_logprobs(request: CompletionRequest, echo: bool, score_only: bool) -> int | None:
    """With `echo`, the prompt gets log-probabilities if the output does, or if there is no output."""
    wanted = [value for value in (request.prompt_logprobs, request.logprobs if echo else None) if value is not None]
    return max(wanted, default=0 if score_only else None)


async def _prompts(state: FrontState, request: CompletionRequest, per_prompt: int, max_tokens: int) -> list[Prompt]:
    texts, token_lists = texts_or_tokens(request.prompt, "prompt", MAX_SEQUENCES)
    num_prompts = max(len(texts), len(token_lists))
    check_num_sequences(num_prompts, per_prompt)
    if request.self_consistency is not None and num_prompts > 1:
        raise BadRequest(
            f"'self_consistency' is a vote over the answers to one prompt, but there are {num_prompts}; send one"
            " request for each.",
            param="self_consistency",
        )
    if request.suffix:
        _check_suffix(request, texts)
        return await fill_in_prompts(state, texts, request.suffix)
    if texts:
        encoded = await encode_texts(
            state,
            texts,
            add_special=request.add_special_tokens is not False,
            may_cut=request.truncate_prompt_tokens is not None,
        )
        prompts = [Prompt(token_ids, text) for token_ids, text in zip(encoded, texts, strict=True)]
    else:
        prompts = [Prompt(token_ids, None) for token_ids in token_lists]
    for prompt in prompts:
        if not prompt.token_ids:
            raise BadRequest("'prompt' has no tokens; send at least one character or token.", param="prompt")
    keep = request.truncate_prompt_tokens
    if keep is None:
        return prompts
    return [cut_prompt(state, prompt.token_ids, prompt.text, keep, max_tokens) for prompt in prompts]


def _check_suffix(request: CompletionRequest, texts: list[str]) -> None:
    if not texts:
        raise BadRequest("'suffix' needs the prompt as text, not as token ids.", param="suffix")
    for name, is_set in (("echo", request.echo), ("truncate_prompt_tokens", request.truncate_prompt_tokens)):
        if is_set:
            raise BadRequest(f"'{name}' cannot be combined with 'suffix'; remove one of them.", param=name)
