"""Cuts of a distribution, batched over rows, in torch ops that never wait for the device.

Logits are float32 [rows, vocab], changed in place; a cut token's logit is -inf. Every option is a column [rows, 1], and
its neutral value keeps every token, so a row's result does not depend on its neighbours. Meaning: docs/api/samplers.md.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

MIROSTAT_TOKENS = 100
"""Likeliest tokens from which mirostat 1 estimates the exponent of Zipf's law."""
NUCLEUS_GUESS = 512
"""Tokens sorted first in the search for a top-p threshold on a CPU."""


def keep_top_k(logits: Tensor, top_k: Tensor, largest: int) -> None:
    """`top_k`: 0 keeps every token; `largest`: its maximum, known to the host."""
    values = logits.topk(largest, dim=-1).values
    floor = values.gather(1, (top_k - 1).clamp(min=0))
    logits.masked_fill_((logits < floor) & (top_k > 0), -torch.inf)


def keep_min_p(logits: Tensor, min_p: Tensor) -> None:
    logits.masked_fill_(logits < logits.amax(dim=-1, keepdim=True) + torch.log(min_p), -torch.inf)


def keep_nucleus(logits: Tensor, top_p: Tensor) -> None:
    """Keep the smallest set of most likely tokens whose probabilities sum to `top_p`; ties at the edge stay."""
    probs = torch.softmax(logits, dim=-1)
    logits.masked_fill_((probs < _nucleus_floor(probs, top_p)) & (top_p < 1), -torch.inf)


def _nucleus_floor(probs: Tensor, top_p: Tensor) -> Tensor:
    vocab_size = probs.shape[1]
    if probs.device.type != "cpu" or vocab_size <= NUCLEUS_GUESS:
        return _edge(probs.sort(dim=-1, descending=True).values, top_p)
    guess = probs.topk(NUCLEUS_GUESS, dim=-1).values
    floor = _edge(guess, top_p)
    short = guess.sum(dim=-1) < top_p[:, 0]
    if short.any():
        floor[short] = _edge(probs[short].sort(dim=-1, descending=True).values, top_p[short])
    return floor


def _edge(descending: Tensor, top_p: Tensor) -> Tensor:
    """The probability of the last token needed to reach `top_p`."""
    before = descending.double().cumsum(dim=-1) - descending.double()
    needed = (before < top_p).sum(dim=-1, keepdim=True).clamp_(min=1)
    return descending.gather(1, needed - 1)


def keep_typical(logits: Tensor, typical_p: Tensor) -> None:
    """Keep the tokens whose surprise is nearest to the entropy, until their probabilities sum to `typical_p`."""
    logprobs = torch.log_softmax(logits, dim=-1)
    probs = logprobs.exp()
    entropy = -torch.where(probs > 0, probs * logprobs, 0.0).sum(dim=-1, keepdim=True)
    order = torch.where(probs > 0, (-logprobs - entropy).abs(), torch.inf).sort(dim=-1, stable=True).indices
    sorted_probs = probs.gather(1, order).double()
    is_kept = sorted_probs.cumsum(dim=-1) - sorted_probs < typical_p
    is_kept[:, 0] = True
    kept = torch.zeros_like(is_kept).scatter_(1, order, is_kept)
    logits.masked_fill_(~kept & (typical_p < 1), -torch.inf)


def keep_top_a(logits: Tensor, top_a: Tensor) -> None:
    """Drop tokens less likely than `top_a` times the square of the greatest probability."""
    probs = torch.softmax(logits, dim=-1)
    logits.masked_fill_(probs < top_a * probs.amax(dim=-1, keepdim=True) ** 2, -torch.inf)


def exclude_top_choices(logits: Tensor, threshold: Tensor, is_due: Tensor) -> None:
    """XTC: where due, drop every token of at least this probability except the least likely one of them."""
    probs = torch.softmax(logits, dim=-1)
    is_top = (probs >= threshold) & (logits > -torch.inf)  # with a threshold of 0, tokens that are gone count for none
    least = torch.where(is_top, probs, torch.inf).amin(dim=-1, keepdim=True)
    # Of several equally likely ones the last stays.
    is_least = is_top & (probs == least)
    last = is_least.shape[1] - 1 - is_least.flip(1).int().argmax(dim=-1, keepdim=True)
    is_top.scatter_(1, last, False)
    logits.masked_fill_(is_top & is_due, -torch.inf)


def scale_by_entropy(logits: Tensor, temperature: Tensor, spread: Tensor, exponent: Tensor) -> None:
    """Dynamic temperature: `temperature` ± `spread`, the greater the nearer the entropy of the tokens left is to its
    maximum. A spread of 0 leaves the row as it is."""
    logprobs = torch.log_softmax(logits, dim=-1)
    probs = logprobs.exp()
    entropy = -torch.where(probs > 0, probs * logprobs, 0.0).sum(dim=-1, keepdim=True)
    num_left = (logits > -torch.inf).sum(dim=-1, keepdim=True)
    relative = entropy / torch.log(num_left.clamp(min=2).float())
    low, high = (temperature - spread).clamp(min=0.0), temperature + spread
    dynamic = (low + (high - low) * relative.clamp(0.0, 1.0) ** exponent).clamp(min=1e-5)
    # The greatest logit becomes 0 first: dividing by a low temperature must not overflow.
    shifted = logits - logits.amax(dim=-1, keepdim=True)
    logits.copy_(torch.where(spread > 0, shifted / dynamic, logits))


def keep_mirostat(logits: Tensor, version: Tensor, mu: Tensor, vocab_size: int) -> None:
    """Keep tokens by their surprise in bits: at most `mu` (version 2), or as many as Zipf's law needs for it (1)."""
    log2_probs = torch.log_softmax(logits, dim=-1) / math.log(2)
    likeliest = log2_probs.amax(dim=-1, keepdim=True)
    beyond = (-log2_probs > mu) & (log2_probs < likeliest)
    logits.masked_fill_(beyond & (version == 2), -torch.inf)
    num_kept = _zipf_count(log2_probs, mu, vocab_size)
    ranks = log2_probs.argsort(dim=-1, descending=True, stable=True).argsort(dim=-1)
    logits.masked_fill_((ranks >= num_kept) & (version == 1), -torch.inf)


def _zipf_count(log2_probs: Tensor, mu: Tensor, vocab_size: int) -> Tensor:
    """How many of the likeliest tokens have an expected surprise of `mu`, if ranks follow Zipf's law: float64 [n, 1]"""
    top = log2_probs.topk(min(MIROSTAT_TOKENS, log2_probs.shape[1]), dim=-1).values.double() * math.log(2)
    ranks = torch.arange(1, top.shape[1] + 1, dtype=torch.float64, device=top.device)
    steps = torch.log(ranks[1:] / ranks[:-1])
    falls = top[:, :-1] - top[:, 1:]
    usable = torch.isfinite(falls)
    product = torch.where(usable, steps * falls, 0.0).sum(dim=-1, keepdim=True)
    squares = torch.where(usable, steps * steps, 0.0).sum(dim=-1, keepdim=True)
    exponent = (product / squares.clamp(min=1e-12)).clamp(min=1e-6)
    epsilon = exponent - 1
    epsilon = torch.where(epsilon.abs() < 1e-6, torch.full_like(epsilon, 1e-6), epsilon)
    base = epsilon * torch.exp2(mu.double()) / (1 - float(vocab_size) ** -epsilon)
    return base.clamp(min=1e-12).pow(1 / exponent).floor().clamp(min=1)


def draw_from(logits: Tensor, uniforms: Tensor) -> Tensor:
    """int64 [rows]: where the cumulative distribution, in token order, exceeds `uniforms` [rows, 1] in [0, 1)."""
    cumulative = torch.softmax(logits, dim=-1).double().cumsum(dim=-1)
    target = uniforms * cumulative[:, -1:]
    return torch.searchsorted(cumulative, target, right=True)[:, 0].clamp_(max=logits.shape[1] - 1)
