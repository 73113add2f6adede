"""Sampling fields of any dialect as `SamplingParams`, and the other limits that a request may set."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from millrace.config import Config, allowed_processors
from millrace.errors import BadRequest
from millrace.params.defaults import SamplingDefaults
from millrace.params.sampling import MAX_LOGIT_BIAS, SamplingParams, check_drafter
from millrace.serve.generate.prompts import LONG_TEXT_CHARS, off_loop
from millrace.serve.state import FrontState
from millrace.text.bad_words import with_bad_word_ids
from millrace.text.breakers import with_breaker_ids
from millrace.text.tokenizers.tokenizer import Tokenizer

MAX_SALT_CHARS = 1024


def sampling_params(
    defaults: SamplingDefaults,
    *,
    stop: str | Sequence[str] | None = None,
    stop_token_ids: Sequence[int] | None = None,
    logit_bias: dict[str, float] | None = None,
    **fields: Any,
) -> SamplingParams:
    """Parameters of one sequence. None means that the client did not send the field: the model's defaults apply.
    `SamplingParams` checks ranges."""
    if fields.get("top_k") == -1:
        fields["top_k"] = 0
    return SamplingParams(
        stop=defaults.stop if stop is None else (stop,) if isinstance(stop, str) else tuple(stop),
        stop_token_ids=tuple(stop_token_ids or ()),
        logit_bias=_logit_bias(logit_bias),
        **defaults.fill(fields),
    )


async def complete(state: FrontState, params: SamplingParams) -> SamplingParams:
    """The parameters with what the tokenizer knows: DRY's breakers and bad words as token ids. Refuses processors
    that the operator does not allow and drafters that the engine does not have."""
    allowed = allowed_processors(state.config) if params.logits_processors else ()
    for name in params.logits_processors:
        if name not in allowed:
            raise BadRequest(
                f"The logits processor {name[:80]!r} is not allowed on this server; its operator can allow it with"
                " --allow-logits-processors.",
                param="logits_processors",
                code="unsupported_parameter",
            )
    check_drafter(params, state.require_engine().drafters if params.speculate != "auto" else ())
    if params.dry_multiplier == 0 and not params.bad_words:
        return params
    return await off_loop(state, LONG_TEXT_CHARS + 1, lambda: _with_token_ids(params, state.tokenizer))


def _with_token_ids(params: SamplingParams, tokenizer: Tokenizer) -> SamplingParams:
    return with_bad_word_ids(with_breaker_ids(params, tokenizer), tokenizer)


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


def salt_of(salt: str | None) -> str:
    if salt is not None and len(salt) > MAX_SALT_CHARS:
        raise BadRequest(
            f"cache_salt has {len(salt)} characters; at most {MAX_SALT_CHARS} are allowed.", param="cache_salt"
        )
    return salt or ""


def deadline_of(timeout: float | None, config: Config, received: float) -> float:
    """On `time.monotonic`, like `received`."""
    seconds = timeout if timeout is not None else config.server.request_timeout_s
    if seconds <= 0:
        raise BadRequest(f"timeout is {seconds}; send a positive number of seconds.", param="timeout")
    return received + seconds
