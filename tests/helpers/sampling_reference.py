"""docs/api/samplers.md on one row of logits: plain loops over Python numbers, nothing shared with the engine."""

from __future__ import annotations

import math
from dataclasses import dataclass

from millrace.params.sampling import SamplingParams


@dataclass
class Candidate:
    token: int
    logit: float
    p: float = 0.0


def with_probs(row: list[Candidate]) -> list[Candidate]:
    """Likeliest first, of equals the lower token first."""
    top = max(one.logit for one in row)
    total = sum(math.exp(one.logit - top) for one in row)
    return sorted(
        (Candidate(one.token, one.logit, math.exp(one.logit - top) / total) for one in row),
        key=lambda one: (-one.p, one.token),
    )


def penalised(logits: list[float], tokens: list[int], num_prompt: int, params: SamplingParams) -> list[float]:
    logits = list(logits)
    n = len(tokens) if params.repeat_last_n < 0 else params.repeat_last_n
    first = max(0, len(tokens) - n)
    for token in set(tokens[first:]):
        value = logits[token]
        logits[token] = value / params.repetition_penalty if value > 0 else value * params.repetition_penalty
    output = tokens[max(first, num_prompt) :]
    for token in set(output):
        logits[token] -= params.frequency_penalty * output.count(token) + params.presence_penalty
    return logits


def dried(logits: list[float], tokens: list[int], breakers: set[int], params: SamplingParams) -> list[float]:
    logits = list(logits)
    if params.dry_range >= 0:
        tokens = tokens[max(0, len(tokens) - params.dry_range) :]
    longest: dict[int, int] = {}
    for end in range(len(tokens) - 1):  # a repetition that ended here was continued by the next token
        length = 0
        while length <= end and tokens[end - length] == tokens[-1 - length] and tokens[-1 - length] not in breakers:
            length += 1
        if length >= max(1, params.dry_allowed_length):
            follower = tokens[end + 1]
            longest[follower] = max(longest.get(follower, 0), length)
    for token, length in longest.items():
        logits[token] -= params.dry_multiplier * params.dry_base ** (length - params.dry_allowed_length)
    return logits


def kept(logits: list[float], params: SamplingParams, *, xtc: bool = False, mu: float = 0.0) -> dict[int, float]:
    """Probabilities of the tokens that are left to draw from."""
    scale = 1.0 if params.dynatemp_range else params.temperature
    row = with_probs([Candidate(token, logit / scale) for token, logit in enumerate(logits) if logit > -math.inf])
    if params.top_k:
        row = with_probs(row[: params.top_k])
    row = with_probs([one for one in row if one.p >= params.min_p * row[0].p])
    row = with_probs(nucleus(row, params.top_p))
    if params.typical_p < 1:
        entropy = -sum(one.p * math.log(one.p) for one in row)
        row = with_probs(nucleus(sorted(row, key=lambda one: abs(-math.log(one.p) - entropy)), params.typical_p))
    row = with_probs([one for one in row if one.p >= params.top_a * row[0].p ** 2])
    if xtc:
        top = [one for one in row if one.p >= params.xtc_threshold]
        row = with_probs(row[max(0, len(top) - 1) :])
    if params.dynatemp_range:
        row = with_dynamic_temperature(row, params)
    if params.mirostat == 2:
        row = with_probs([one for one in row if one is row[0] or -math.log2(one.p) <= mu])
    if params.mirostat == 1:
        row = with_probs(row[: zipf_count(row, mu, len(logits))])
    return {one.token: one.p for one in row}


def nucleus(row: list[Candidate], mass: float) -> list[Candidate]:
    chosen, total = [], 0.0
    for one in row:
        if total >= mass:
            break
        chosen.append(one)
        total += one.p
    return chosen


def with_dynamic_temperature(row: list[Candidate], params: SamplingParams) -> list[Candidate]:
    entropy = -sum(one.p * math.log(one.p) for one in row)
    relative = entropy / math.log(max(2, len(row)))
    low, high = max(0.0, params.temperature - params.dynatemp_range), params.temperature + params.dynatemp_range
    temperature = max(1e-5, low + (high - low) * relative**params.dynatemp_exponent)
    return with_probs([Candidate(one.token, (one.logit - row[0].logit) / temperature) for one in row])


def zipf_count(row: list[Candidate], mu: float, vocab_size: int) -> int:
    product = squares = 0.0
    for rank in range(1, min(100, len(row))):
        step = math.log((rank + 1) / rank)
        product += step * math.log(row[rank - 1].p / row[rank].p)
        squares += step * step
    exponent = product / squares
    epsilon = exponent - 1
    base = epsilon * 2**mu / (1 - vocab_size**-epsilon)
    return max(1, int(base ** (1 / exponent)))
