"""What chat and completions share on the way from a body to a `Generation`: refusals by name, and sampling."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec import UNSET

from millrace.config import Config
from millrace.errors import BadRequest, ContextOverflow, ModelNotFound
from millrace.params import MAX_LOGIT_BIAS, MAX_LOGPROBS, SamplingParams
from millrace.serve.openai.schemas import MAX_SEQUENCES, NOT_SUPPORTED, PRIORITY_CLASSES, Sampled

MAX_LABEL_CHARS = 1024
MAX_METADATA = 64
_LONGEST_NEUTRAL_BYTES = 256
_SHOWN_BYTES = 60
_INTEGERS = (
    *("max_tokens", "max_completion_tokens", "n", "seed", "top_k", "min_tokens", "logprobs", "top_logprobs"),
    *("prompt_logprobs", "best_of", "priority", "truncate_prompt_tokens"),
)


def check_model(name: str, served: str) -> None:
    if name != served:
        raise ModelNotFound(
            f"The model {name[:200]!r} is not served here; this server serves {served!r}, use that name.",
            param="model",
        )


def check_fields(request: Sampled) -> None:
    """Refuse what is not honoured, and integers that no machine word holds."""
    refuse_unsupported(request, NOT_SUPPORTED, "")
    for name in _INTEGERS:
        value = getattr(request, name, None)
        if type(value) is int and value.bit_length() > 64:
            raise BadRequest(
                f"{name} is an integer of {value.bit_length()} bits; send one that fits in 64 bits.", param=name
            )
    if request.metadata is not None and len(request.metadata) > MAX_METADATA:
        raise BadRequest(
            f"metadata holds {len(request.metadata)} entries; at most {MAX_METADATA} are allowed.", param="metadata"
        )
    if request.stream_options is not None:
        _check_stream_options(request)


def refuse_unsupported(body: msgspec.Struct, neutral: Mapping[str, tuple[Any, ...]], prefix: str) -> None:
    """`neutral` maps a field to the values that, like null, ask for nothing."""
    for name, accepted in neutral.items():
        raw = getattr(body, name, UNSET)
        if raw is UNSET or _asks_for_nothing(raw, accepted):
            continue
        param = prefix + name
        raise BadRequest(
            f"'{param}' (sent as {_shown(raw)}) is not supported yet; remove it.",
            param=param,
            code="unsupported_parameter",
        )


def _shown(raw: msgspec.Raw) -> str:
    data = bytes(memoryview(raw)[: _SHOWN_BYTES + 1])
    text = data.decode("utf-8", "ignore")
    return text if len(data) <= _SHOWN_BYTES else text[:_SHOWN_BYTES] + "…"


def _asks_for_nothing(raw: msgspec.Raw, accepted: tuple[Any, ...]) -> bool:
    data = memoryview(raw)
    if len(data) > _LONGEST_NEUTRAL_BYTES:
        return False
    try:
        value = msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return False
    return value is None or any(type(value) is type(one) and value == one for one in accepted)


def _check_stream_options(request: Sampled) -> None:
    assert request.stream_options is not None
    if not request.stream:
        raise BadRequest(
            "'stream_options' is only allowed when 'stream' is true; remove it or set stream to true.",
            param="stream_options",
        )
    refuse_unsupported(request.stream_options, {"include_obfuscation": (False,)}, "stream_options.")


def sampling_params(
    request: Sampled, *, max_tokens: int | None, logprobs: int | None, prompt_logprobs: int | None
) -> SamplingParams:
    """The checked parameters of one sequence; its own sentences name the field and its range."""
    stop = request.stop
    return SamplingParams(
        max_tokens=max_tokens,
        min_tokens=_or(request.min_tokens, 0),
        temperature=_or(request.temperature, 1.0),
        top_k=0 if request.top_k in (None, -1) else _or(request.top_k, 0),
        top_p=_or(request.top_p, 1.0),
        min_p=_or(request.min_p, 0.0),
        repetition_penalty=_or(request.repetition_penalty, 1.0),
        presence_penalty=_or(request.presence_penalty, 0.0),
        frequency_penalty=_or(request.frequency_penalty, 0.0),
        logit_bias=_logit_bias(request.logit_bias),
        seed=request.seed,
        stop=() if stop is None else (stop,) if isinstance(stop, str) else tuple(stop),
        stop_token_ids=tuple(request.stop_token_ids or ()),
        ignore_eos=bool(request.ignore_eos),
        include_stop_str_in_output=bool(request.include_stop_str_in_output),
        skip_special_tokens=request.skip_special_tokens is not False,
        n=_or(request.n, 1),
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
    )


def _or(value: Any, default: Any) -> Any:
    return default if value is None else value


def _logit_bias(biases: dict[str, float] | None) -> tuple[tuple[int, float], ...]:
    if not biases:
        return ()
    if len(biases) > MAX_LOGIT_BIAS:
        raise BadRequest(
            f"logit_bias holds {len(biases)} entries; at most {MAX_LOGIT_BIAS} are allowed.", param="logit_bias"
        )
    pairs = []
    for key, bias in biases.items():
        if not (key.isascii() and key.isdigit() and len(key) <= 10):
            raise BadRequest(
                f"logit_bias has the key {key[:80]!r}; its keys are token ids, such as '50'.", param="logit_bias"
            )
        pairs.append((int(key), bias))
    return tuple(pairs)


def check_range(name: str, value: int | None, low: int, high: int) -> None:
    if value is not None and not low <= value <= high:
        raise BadRequest(f"{name} is {value}; it must be between {low} and {high}.", param=name)


def check_logprobs(name: str, value: int | None) -> None:
    check_range(name, value, 0, MAX_LOGPROBS)


def check_num_sequences(num_prompts: int, per_prompt: int) -> None:
    total = num_prompts * per_prompt
    if total > MAX_SEQUENCES:
        raise BadRequest(
            f"The request asks for {num_prompts} prompts × {per_prompt} choices = {total} sequences;"
            f" at most {MAX_SEQUENCES} are allowed in one request. Split it.",
            param="n",
        )


def check_truncation(keep: int | None) -> None:
    if keep is not None and (keep < -1 or keep == 0):
        raise BadRequest(
            f"truncate_prompt_tokens is {keep}; send how many tokens to keep, or -1 for as many as fit.",
            param="truncate_prompt_tokens",
        )


def priority_of(request: Sampled) -> int:
    value = request.priority
    if value is None:
        return PRIORITY_CLASSES["standard"]
    if isinstance(value, str):
        return PRIORITY_CLASSES[value]
    check_range("priority", value, 0, 2)
    return value


def salt_of(request: Sampled) -> str:
    salt = request.cache_salt or ""
    if len(salt) > MAX_LABEL_CHARS:
        raise BadRequest(
            f"cache_salt has {len(salt)} characters; at most {MAX_LABEL_CHARS} are allowed.", param="cache_salt"
        )
    return salt


def deadline_of(request: Sampled, config: Config, received: float) -> float:
    seconds = request.timeout if request.timeout is not None else config.server.request_timeout_s
    if seconds <= 0:
        raise BadRequest(f"timeout is {seconds}; give a positive number of seconds.", param="timeout")
    return received + seconds


def name_fields(error: BadRequest, names: Mapping[str, str]) -> BadRequest:
    """The same error under the names that this endpoint's clients use."""
    ours = error.param
    if ours is None or ours not in names:
        return error
    theirs = names[ours]
    kind = ContextOverflow if isinstance(error, ContextOverflow) else BadRequest
    message = error.message if ours == "prompt" else error.message.replace(ours, theirs)
    return kind(message, param=theirs, code=error.code)
