"""Drafts on the device: proposing them before a step's body, and accepting them after its draw.

While steps are in flight only the device knows how many tokens a row has. Three columns by table row hold it: `known`
(tokens of the row), `limit` (the most it may get) and `history` (the tokens themselves). `place_drafts` turns them into
a step's inputs: each row has `places` places, for its last token and for drafts; unused places are UNUSED. Drafts that
the host gives go first, then those from the row's prediction, then those of the drafter. After a token was drawn at
every place, `accept_drafts` keeps those up to the first wrong draft and moves the columns on.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from millrace.ops.base.draft_sources import OWN_DRAFTS, PREDICTED
from millrace.ops.triton.kernel_keys import settle_keys

UNUSED = -2
"""A place without a token: its keys and values go to the scratch block, and nothing is drawn from it."""
PADDING, ENDED = -1, -2
"""Table row of a state that does not draw: it belongs to no row; its row is at its limit, or the place is unused."""
TILE = 1024
PREDICTED_MATCH = 16
"""Tokens that are compared to find a place in a prediction."""
NUM_COUNTS = 3
"""Numbers that a step leaves for each row."""

_UNUSED = tl.constexpr(UNUSED)
_PADDING = tl.constexpr(PADDING)
_ENDED = tl.constexpr(ENDED)
_OWN_DRAFTS = tl.constexpr(OWN_DRAFTS)
_PREDICTED = tl.constexpr(PREDICTED)


@dataclass(frozen=True, slots=True)
class PredictedColumns:
    """By table row: what its client expects the answer to contain."""

    addresses: Tensor
    """int64: of its tokens, int32; 0 for none."""
    lengths: Tensor
    num_prompt: Tensor


@dataclass(frozen=True, slots=True)
class DraftColumns:
    """By table row, all int32."""

    known: Tensor
    limit: Tensor
    history: Tensor
    """[rows, longest context]"""
    holds_drafts: bool = False
    """True if a drafter writes its drafts to `history`, behind the known tokens; False for n-gram drafts."""
    max_match: int = 3
    """Tokens that are compared to find the longest match."""
    repeats: bool = False
    """Drafts go on beyond the end of the text, as a phrase that repeats does."""
    predicted: PredictedColumns | None = None
    sources: Tensor | None = None
    """Receives where the drafts come from. Unchanged if the host gives them."""


@triton.jit
def _longest_match(text, length, history, known, num_tail, TILE: tl.constexpr, MATCH: tl.constexpr,
                   LATEST: tl.constexpr):  # fmt: skip
    """Where the continuation of a row's last tokens begins in the text: of the places in which most tokens are equal,
    two at least and MATCH at most, the latest or the first. `length` if there is none. `num_tail`: of the row's last
    tokens, those that count; two at least, unless nothing can be found."""
    lane = tl.arange(0, TILE)
    second = tl.load(history + known - 2, mask=known >= 2, other=-1)
    first = tl.load(history + known - 1)
    best = tl.full([TILE], -1, tl.int32)
    longest = tl.zeros([TILE], tl.int32)
    for start in range(0, length - 2, TILE):
        # A pair at `at` and `at + 1`, and the tokens before it.
        at = start + lane
        inside = at < length - 2
        here = tl.load(text + at, mask=inside, other=-2)
        after = tl.load(text + at + 1, mask=inside, other=-2)
        equal = inside & (here == second) & (after == first)
        if tl.max(equal.to(tl.int32), 0) > 0:
            num_equal = tl.where(equal, 2, 0)
            for back in tl.static_range(3, MATCH + 1):
                wanted = tl.load(history + known - back, mask=num_tail >= back, other=-1)
                equal = equal & (at + 2 >= back)
                equal = equal & (tl.load(text + at + 2 - back, mask=equal, other=-2) == wanted)
                num_equal += equal.to(tl.int32)
            is_best = (num_equal > 0) & (num_equal >= longest + (0 if LATEST else 1))
            best = tl.where(is_best, at, best)
            longest = tl.where(is_best, num_equal, longest)
    most = tl.max(longest, 0)
    if LATEST:
        found = tl.max(tl.where(longest == most, best, -1), 0)
    else:
        found = tl.min(tl.where(longest == most, best, length), 0)
    return tl.where(found >= 0, found + 2, length)


@triton.jit
def _predicted_from(text, length, history, known, num_output, TILE: tl.constexpr, MATCH: tl.constexpr):
    """Where the prediction goes on after the row's output: an answer is expected to begin as the prediction does; later
    the place is where most tokens before it are equal. `length` if there is none."""
    is_begun = (num_output == 1) & (tl.load(text) == tl.load(history + known - 1))
    found = tl.where((num_output == 0) | is_begun, num_output, length)
    if num_output >= 2:
        found = _longest_match(text, length, history, known, num_output, TILE, MATCH, False)
    return found


@triton.jit
def _place_kernel(known_ptr, limit_ptr, history_ptr, history_stride, predictions, num_predicted, num_prompt, sources,
                  table_rows, max_drafts, starts, seq_lens, tokens_in, PLACES: tl.constexpr, LANES: tl.constexpr,
                  TILE: tl.constexpr, HOLDS_DRAFTS: tl.constexpr, MATCH: tl.constexpr, REPEATS: tl.constexpr,
                  PREDICTED_MATCH: tl.constexpr):  # fmt: skip
    """One row per program. REPEATS: drafts go on beyond the end of the text, as a phrase that repeats does. Run twice,
    it does the same twice: what it found counts as given."""
    row = tl.program_id(0)
    drafts = tl.load(max_drafts + row)
    if drafts < 0:
        return
    table_row = tl.load(table_rows + row).to(tl.int64)
    known = tl.load(known_ptr + table_row)
    limit = tl.load(limit_ptr + table_row)
    history = history_ptr + table_row * history_stride
    place = tl.arange(0, LANES)
    drafts = tl.minimum(tl.minimum(drafts, PLACES - 1), limit - known - 1)
    first = known
    num_found = drafts
    behind = place - 1
    given = tl.load(tokens_in + row * PLACES + place, mask=(place > 0) & (place < PLACES), other=_UNUSED)
    num_given = tl.sum((given >= 0).to(tl.int32), 0)
    if PLACES > 1 and predictions is not None:
        address = tl.load(predictions + table_row)
        is_due = (drafts > 0) & (num_given == 0)
        if is_due:
            tl.store(sources + table_row, _OWN_DRAFTS)
        if is_due & (address != 0):
            text = address.to(tl.pointer_type(tl.int32))
            length = tl.load(num_predicted + table_row)
            num_output = known - tl.load(num_prompt + table_row)
            at = _predicted_from(text, length, history, known, num_output, TILE, PREDICTED_MATCH) + place - 1
            given = tl.load(text + at, mask=(place > 0) & (place < PLACES) & (at < length), other=_UNUSED)
            num_given = tl.sum((given >= 0).to(tl.int32), 0)
            if num_given > 0:
                tl.store(sources + table_row, _PREDICTED)
    if PLACES > 1 and not HOLDS_DRAFTS:
        if (drafts > 0) & (num_given == 0):
            first = _longest_match(history, known, history, known, known, TILE, MATCH, True)
        num_found = known - first
        if REPEATS:
            behind = (place + LANES - 1) % LANES % tl.maximum(num_found, 1)
            num_found = tl.where(num_found > 0, drafts, 0)
    num_found = tl.where(num_given > 0, num_given, num_found)
    used = 1 + tl.maximum(tl.minimum(drafts, num_found), 0)
    source = tl.where(place == 0, known - 1, first + behind)
    used = tl.where(known < limit, used, 0)
    num_read = tl.where(num_given > 0, tl.minimum(used, 1), used)
    token = tl.load(history + source, mask=place < num_read, other=_UNUSED)
    token = tl.where((place >= num_read) & (place < used), given, token)
    tl.store(tokens_in + row * PLACES + place, token, mask=place < PLACES)
    tl.store(starts + row, known - 1)
    tl.store(seq_lens + row, known - 1 + PLACES)


@triton.jit
def _state_kernel(states, rows, positions, max_drafts, starts, tokens_in, num_rows, PLACES: tl.constexpr):
    """One state per program."""
    at = tl.program_id(0)
    if tl.load(rows + at) < 0:
        return
    state = tl.load(states + at)
    row = state // PLACES
    if tl.load(max_drafts + row, mask=row < num_rows, other=-1) < 0:
        return
    if tl.load(tokens_in + state) == _UNUSED:
        tl.store(rows + at, _ENDED)
    tl.store(positions + at, tl.load(starts + row) + state % PLACES + 1)


@triton.jit
def _list_kernel(listed, entries, max_drafts, seq_lens, num_rows):
    """One entry of the list of decode rows per program. Decode rows come first, so their token is their row."""
    at = tl.program_id(0)
    row = tl.load(listed + at)
    is_real = (tl.load(listed + 2 * entries + at) > 0) & (row < num_rows)
    if tl.load(max_drafts + row, mask=is_real, other=-1) >= 0:
        tl.store(listed + 2 * entries + at, tl.load(seq_lens + row))


@triton.jit
def _accept_kernel(known_ptr, history_ptr, history_stride, sources, rows, states, index, tokens_in, drawn, drawn_start,
                   counts, counts_start, last_tokens, PLACES: tl.constexpr, LANES: tl.constexpr,
                   COUNTS: tl.constexpr):  # fmt: skip
    """One row per program: PLACES states."""
    first = tl.program_id(0) * PLACES
    row = tl.load(rows + first)
    if row == _PADDING:
        return
    token_index = tl.load(index + first)
    counts += (tl.load(counts_start) + token_index // PLACES) * COUNTS
    if row == _ENDED:
        for at in tl.static_range(COUNTS):
            tl.store(counts + at, 0)
        return
    place = tl.arange(0, LANES)
    inside = place < PLACES
    num_drafts = tl.full([], 0, tl.int32)
    drawn += tl.load(drawn_start) + token_index
    token = tl.load(drawn + place, mask=inside, other=-1)
    count = tl.full([], 1, tl.int32)
    if PLACES > 1:
        # Place i holds a right draft if it equals the token drawn at place i - 1.
        earlier = tl.load(drawn + place - 1, mask=inside & (place > 0), other=-1)
        draft = tl.load(tokens_in + tl.load(states + first) + place, mask=inside & (place > 0), other=_UNUSED)
        is_right = (place == 0) | (inside & (draft == earlier))
        count = tl.min(tl.where(is_right, LANES, place), 0)
        num_drafts = tl.sum((draft != _UNUSED).to(tl.int32), 0)
    table_row = row.to(tl.int64)
    known = tl.load(known_ptr + table_row)
    tl.store(history_ptr + table_row * history_stride + known + place, token, mask=place < count)
    tl.store(known_ptr + table_row, known + count)
    tl.store(last_tokens + table_row, tl.load(drawn + count - 1).to(last_tokens.dtype.element_ty))
    tl.store(counts, count)
    tl.store(counts + 1, num_drafts)
    tl.store(counts + 2, tl.load(sources + table_row) if sources is not None else _OWN_DRAFTS)


@dataclass(frozen=True, slots=True)
class DraftedStep:
    """The parts of a step's packet that drafts change, all int32 on the device."""

    places: int
    table_rows: Tensor
    """[n]"""
    max_drafts: Tensor
    """[n]: drafts that a row may have; negative for rows whose tokens, start and draws the host knows."""
    starts: Tensor
    seq_lens: Tensor
    """[n]: tokens in the cache once all places are written, unused ones too."""
    tokens_in: Tensor
    """Row after row, `places` of each; with one place, all tokens of the step's first n rows must be single ones. From
    a row's second place on: the drafts that the host gives it, the rest negative."""
    states: Tensor
    """[m], m a multiple of `places`: index of each state's token; the states of a row follow one another."""
    rows: Tensor
    """[m]: table row of each state, PADDING for none."""
    positions: Tensor
    """[m]: those of the tokens to draw."""
    listed: Tensor | None = None
    """[LIST_COLUMNS, entries]: list of the decode rows, whose lengths are corrected."""


def place_drafts(step: DraftedStep, columns: DraftColumns) -> None:
    """Write start, length, tokens and draw positions of the step's rows from the device's columns, with drafts: those
    that are given, else from the row's prediction, else what followed the last tokens of a row where most of them
    occurred before. States of unused places become ENDED."""
    history, predicted = columns.history, columns.predicted
    texts = (None, None, None) if predicted is None else (predicted.addresses, predicted.lengths, predicted.num_prompt)
    _place_kernel[(len(step.table_rows),)](
        columns.known, columns.limit, history, history.stride(0), *texts, columns.sources, step.table_rows,
        step.max_drafts, step.starts, step.seq_lens, step.tokens_in, PLACES=step.places,
        LANES=triton.next_power_of_2(max(2, step.places)), TILE=TILE, HOLDS_DRAFTS=columns.holds_drafts,
        MATCH=columns.max_match, REPEATS=columns.repeats, PREDICTED_MATCH=PREDICTED_MATCH, num_warps=4,
    )  # fmt: skip
    _state_kernel[(len(step.states),)](
        step.states, step.rows, step.positions, step.max_drafts, step.starts, step.tokens_in, len(step.table_rows),
        PLACES=step.places, num_warps=1,
    )  # fmt: skip
    if step.listed is not None:
        entries, num_rows = step.listed.shape[1], len(step.table_rows)
        _list_kernel[(entries,)](step.listed, entries, step.max_drafts, step.seq_lens, num_rows, num_warps=1)


@dataclass(frozen=True, slots=True)
class AcceptedTokens:
    """Where drawn tokens are, and where each row's counts go. int32, on the device."""

    index: Tensor
    """[m]: where the token of each state is, counted from drawn_start[0]: `places` tokens of each row."""
    drawn: Tensor
    drawn_start: Tensor
    counts: Tensor
    """Receives NUM_COUNTS numbers of each row, at index // places counted from counts_start[0]: tokens kept, drafts,
    and where those came from."""
    counts_start: Tensor
    last_tokens: Tensor
    """[table rows]"""


def accept_drafts(step: DraftedStep, columns: DraftColumns, tokens: AcceptedTokens) -> None:
    """Of the tokens drawn at a row's places keep the first, and each further one while the draft before it was right;
    append them to the row's history. A row at its limit keeps none."""
    history = columns.history
    _accept_kernel[(len(step.rows) // step.places,)](
        columns.known, history, history.stride(0), columns.sources, step.rows, step.states, tokens.index,
        step.tokens_in, tokens.drawn, tokens.drawn_start, tokens.counts, tokens.counts_start, tokens.last_tokens,
        PLACES=step.places, LANES=triton.next_power_of_2(max(2, step.places)), COUNTS=NUM_COUNTS, num_warps=1,
    )  # fmt: skip


settle_keys(globals())
