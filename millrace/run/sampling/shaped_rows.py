"""Draws for rows with options beyond temperature, top-k, min-p, top-p and penalties over the whole context.

One implementation for both devices: torch ops that never wait for the device. Logits come with mask, bias and minimum
length applied. Order: penalties, DRY, logits processors, allowed tokens, bad words, temperature, top-k, min-p, top-p,
typical-p, top-a, XTC, dynamic temperature, mirostat, draw (docs/api/samplers.md). A draw depends on the row's tokens,
its seed and its position, and with mirostat on `mu`, which is kept by position and survives preemption.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from millrace.params.draws import DrawParams
from millrace.plan.step import Admission, Int32s, Release
from millrace.run.device.device import Device
from millrace.run.sampling.cuts import (
    draw_from,
    exclude_top_choices,
    keep_min_p,
    keep_mirostat,
    keep_nucleus,
    keep_top_a,
    keep_top_k,
    keep_typical,
    scale_by_entropy,
)
from millrace.run.sampling.noise import uniforms
from millrace.run.sampling.processors import Processor, load_processor
from millrace.run.sampling.repetition import penalise_recent, penalise_repeats
from millrace.run.sampling.row_params import RowParamTable
from millrace.run.sampling.token_limits import BadWords, bad_words_of, forbidden_tokens
from millrace.run.table.request_table import RequestTable

MU_RING = 8
"""Values of mu kept per row, by position: a preempted row may draw again at a position that it has drawn before."""
MAX_PREEMPTED = 4096
"""Preempted requests whose mu is kept. Beyond this the one that has waited longest starts mirostat anew."""
XTC_KEY = np.uint64(0x5851F42D4C957F2D)
"""Tells XTC's random numbers from those of the draws."""


@dataclass(slots=True)
class _Row:
    request_id: int
    num_prompt: int
    params: DrawParams
    reads_text: bool
    """True if the options depend on the row's tokens, which the request table then keeps on the device."""
    is_breaker: Tensor | None
    """bool [vocab], with DRY."""
    processors: tuple[Processor, ...]
    forbidden: Tensor | None
    """bool [vocab], with `allowed_token_ids`."""
    bad_words: BadWords | None


class ShapedRows:
    def __init__(self, device: Device, table: RequestTable, row_params: RowParamTable, *, vocab_size: int) -> None:
        self._device = device
        self._table = table
        self._row_params = row_params
        self._vocab_size = vocab_size
        self.rows: dict[int, _Row] = {}
        self.mu: dict[int, Tensor] = {}
        """By row: mu for the draw at position p is at index p % MU_RING."""
        self.preempted: OrderedDict[int, Tensor] = OrderedDict()
        """By request: mu of rows that were preempted."""

    def release(self, release: Release) -> None:
        if self.rows.pop(release.row, None) is None:
            return
        mu = self.mu.pop(release.row, None)
        if mu is not None and release.reason == "preempted":
            self.preempted[release.request_id] = mu
            if len(self.preempted) > MAX_PREEMPTED:
                self.preempted.popitem(last=False)

    def update(self, admission: Admission, *, is_shaped: bool) -> None:
        """A request gets a row. Without these options the row is not one of these."""
        if is_shaped:
            self._admit(admission)
        elif self.rows.pop(admission.row, None) is not None:
            self.mu.pop(admission.row, None)

    def _admit(self, admission: Admission) -> None:
        row, params = admission.row, admission.row_params.params
        last = self.rows.get(row)
        if params.mirostat and (last is None or last.request_id != admission.request_id):
            first = torch.full((MU_RING,), 2 * params.mirostat_tau, device=self._device.torch_device)
            self.mu[row] = self.preempted.pop(admission.request_id, first)
        reads_text = params.needs_tokens or params.uses_penalties
        if reads_text:
            self._table.keep_text(admission)
        self.rows[row] = _Row(
            admission.request_id,
            admission.num_prompt,
            params,
            reads_text,
            self._breakers(params) if params.dry_multiplier > 0 else None,
            tuple(load_processor(name) for name in params.logits_processors),
            forbidden_tokens(admission.row_params, self._device, self._vocab_size),
            bad_words_of(admission.row_params, self._device, self._vocab_size),
        )

    def _breakers(self, params: DrawParams) -> Tensor:
        is_breaker = np.zeros(self._vocab_size, np.bool_)
        ids = np.array(params.dry_breaker_ids or (), np.int64)
        is_breaker[ids[ids < self._vocab_size]] = True
        return self._device.upload(is_breaker)

    def draw(self, logits: Tensor, rows: Int32s, positions: Int32s) -> Tensor:
        """int64 [n]. `logits` float32 [n, vocab], changed; `positions`: those of the new tokens."""
        records = [self.rows[row] for row in rows.tolist()]
        for index, (row, record, place) in enumerate(zip(rows.tolist(), records, positions.tolist(), strict=True)):
            text = self._table.text(row, place) if record.reads_text else None
            if text is not None:
                self._penalise(logits[index], record, text)
            if record.forbidden is not None:
                logits[index].masked_fill_(record.forbidden, -torch.inf)
            if record.bad_words is not None and text is not None:
                record.bad_words.forbid(logits[index], text[record.num_prompt :])
        return self._choose(logits, rows, positions, [record.params for record in records])

    def _penalise(self, logits: Tensor, record: _Row, tokens: Tensor) -> None:
        params = record.params
        if params.uses_penalties:
            penalise_recent(logits, tokens, record.num_prompt, params)
        if record.is_breaker is not None:
            penalise_repeats(logits, tokens, record.is_breaker, params)
        for processor in record.processors:
            logits.copy_(processor(tokens, logits))

    def _choose(self, logits: Tensor, rows: Int32s, positions: Int32s, params: list[DrawParams]) -> Tensor:
        columns = _Columns(self._device, self._row_params, rows, positions, params)
        greedy = logits.argmax(dim=-1)
        if not columns.any("temperature"):
            return greedy
        logits = logits / columns.of("static_temperature")
        self._cut(logits, columns)
        if columns.any("dynatemp_range"):
            scale_by_entropy(
                logits, columns.of("temperature"), columns.of("dynatemp_range"), columns.of("dynatemp_exponent")
            )
        mirostat = [index for index, one in enumerate(params) if one.mirostat]
        if mirostat:
            mu = self._mu_of(rows, positions, mirostat, len(rows))
            keep_mirostat(logits, columns.of("mirostat"), mu, self._vocab_size)
        tokens = torch.where(columns.of("temperature")[:, 0] > 0, draw_from(logits, columns.uniforms), greedy)
        if mirostat:
            self._learn(logits, tokens, rows, positions, params, mirostat)
        return tokens

    def _cut(self, logits: Tensor, columns: _Columns) -> None:
        if columns.any("top_k"):
            keep_top_k(logits, columns.of("top_k").long(), columns.largest("top_k"))
        if columns.any("min_p"):
            keep_min_p(logits, columns.of("min_p"))
        if columns.any("top_p_cut"):
            keep_nucleus(logits, columns.of("top_p"))
        if columns.any("typical_p_cut"):
            keep_typical(logits, columns.of("typical_p"))
        if columns.any("top_a"):
            keep_top_a(logits, columns.of("top_a"))
        if columns.any("xtc_due"):
            exclude_top_choices(logits, columns.of("xtc_threshold"), columns.of("xtc_due") > 0)

    def _mu_of(self, rows: Int32s, positions: Int32s, mirostat: list[int], count: int) -> Tensor:
        """float32 [count, 1]; rows without mirostat have 0."""
        none = torch.zeros(1, device=self._device.torch_device)
        mu = [none] * count
        for index in mirostat:
            at = int(positions[index]) % MU_RING
            mu[index] = self.mu[int(rows[index])][at : at + 1]
        return torch.stack(mu)

    def _learn(
        self,
        logits: Tensor,
        tokens: Tensor,
        rows: Int32s,
        positions: Int32s,
        params: list[DrawParams],
        mirostat: list[int],
    ) -> None:
        """Move mu by the surprise of each drawn token, in bits, among the tokens that were left."""
        chosen = torch.log_softmax(logits, dim=-1).gather(1, tokens[:, None])[:, 0] / -float(np.log(2))
        for index in mirostat:
            one, position, ring = params[index], int(positions[index]), self.mu[int(rows[index])]
            now, after = position % MU_RING, (position + 1) % MU_RING
            ring[after] = ring[now] - one.mirostat_eta * (chosen[index] - one.mirostat_tau)


class _Columns:
    """The options of the rows of a draw as columns, in one upload."""

    _NAMES = (
        "static_temperature",
        "temperature",
        "dynatemp_range",
        "dynatemp_exponent",
        "top_k",
        "min_p",
        "top_p",
        "top_p_cut",
        "typical_p",
        "typical_p_cut",
        "top_a",
        "xtc_threshold",
        "xtc_due",
        "mirostat",
        "uniform",
    )

    def __init__(
        self,
        device: Device,
        row_params: RowParamTable,
        rows: Int32s,
        positions: Int32s,
        params: list[DrawParams],
    ) -> None:
        seeds, at = row_params.seed[rows], positions.astype(np.uint64)
        temperature = row_params.temperature[rows].astype(np.float64)
        further = np.array(
            [
                (
                    one.dynatemp_range,
                    one.dynatemp_exponent,
                    one.typical_p,
                    one.top_a,
                    one.xtc_threshold,
                    one.xtc_probability,
                    one.mirostat,
                )
                for one in params
            ]
        ).T
        spread, exponent, typical_p, top_a, threshold, probability, mirostat = further
        is_random = temperature > 0
        self._host = dict(
            zip(
                self._NAMES,
                (
                    np.where(is_random & (spread == 0), temperature, 1.0),
                    temperature,
                    np.where(is_random, spread, 0.0),
                    exponent,
                    row_params.top_k[rows],
                    row_params.min_p[rows],
                    row_params.top_p[rows],
                    row_params.top_p[rows] < 1,
                    typical_p,
                    typical_p < 1,
                    top_a,
                    threshold,
                    uniforms(seeds ^ XTC_KEY, at) < probability,
                    mirostat,
                    uniforms(seeds, at),
                ),
                strict=True,
            )
        )
        packed = device.upload(np.stack([np.asarray(part, np.float64) for part in self._host.values()]))
        self._device = dict(zip(self._NAMES, packed[:, :, None].unbind(), strict=True))

    def any(self, name: str) -> bool:
        return bool(np.any(self._host[name]))

    def largest(self, name: str) -> int:
        return int(self._host[name].max())

    def of(self, name: str) -> Tensor:
        """float32 [n, 1]"""
        return self._device[name].float()

    @property
    def uniforms(self) -> Tensor:
        """float64 [n, 1]"""
        return self._device["uniform"]
