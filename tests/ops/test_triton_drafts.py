"""Drafts on the device against their definition: `propose_ngram`, and a loop that accepts one token after the other."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers.triton_mode import device, interpreted

from millrace.ops.base.draft_sources import OWN_DRAFTS, PREDICTED
from millrace.ops.triton import drafts as kernels
from millrace.ops.triton.drafts import (
    ENDED,
    PADDING,
    UNUSED,
    AcceptedTokens,
    DraftColumns,
    DraftedStep,
    PredictedColumns,
    accept_drafts,
    place_drafts,
)
from millrace.run.drafting.ngram import propose_ngram

MAX_ROWS, CONTEXT, MIDDLE = 9, 80, 80


@pytest.fixture(autouse=True)
def _small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "TILE", 16)


def on_device(values: object) -> torch.Tensor:
    return torch.tensor(np.asarray(values, np.int32), device=device)


class Rows:
    """Rows with repetitive histories, some near or at their limit, and a step over some of them."""

    def __init__(self, seed: int, places: int) -> None:
        self.rng = rng = np.random.default_rng(seed)
        self.places = places
        self.known = rng.integers(1, CONTEXT - 10, MAX_ROWS)
        self.known[rng.integers(MAX_ROWS)] = rng.integers(1, 4)
        self.history = rng.integers(0, int(rng.choice([2, 3, 6])), (MAX_ROWS, CONTEXT))
        self.limit = self.known + rng.choice([0, 1, 2, 3, 10], MAX_ROWS)
        self.columns = DraftColumns(*map(on_device, (self.known, self.limit, self.history)))
        self.rows = rng.permutation(MAX_ROWS)[: rng.integers(1, MAX_ROWS + 1)]
        num = len(self.rows)
        self.max_drafts = rng.choice([-1, 0, 1, 3, 7], num) if places > 1 else rng.choice([-1, 0], num)
        self.given = rng.integers(100, 200, num * places)
        self.num_given = rng.choice([0, 0, 1, 2, 7], num).clip(max=places - 1)
        is_given = np.arange(places) <= self.num_given[:, None]
        self.given[~is_given.ravel()] = -1
        # Full rows before the middle, greedy ones after it; two rows of padding in the batch.
        num_full = int(rng.integers(0, num + 1))
        order = rng.permutation(num)
        first = MIDDLE - num_full * places
        entries = slice(first, first + num * places)
        states, table_rows = np.zeros(2 * MIDDLE, np.int64), np.full(2 * MIDDLE, PADDING)
        index, positions = np.zeros(2 * MIDDLE, np.int64), np.zeros(2 * MIDDLE, np.int64)
        every = np.arange(places)
        states[entries] = (order[:, None] * places + every).ravel()
        index[entries] = states[entries]  # all rows draw: tokens are in plan order
        table_rows[entries] = self.rows[order].repeat(places)
        positions[entries] = 777
        self.entries, self.order, self.index = entries, order, index
        self.step = DraftedStep(
            places=places,
            table_rows=on_device([*self.rows, MAX_ROWS - 1, MAX_ROWS - 1]),
            max_drafts=on_device([*self.max_drafts, -1, -1]),
            starts=on_device([33] * (num + 2)),
            seq_lens=on_device([34] * (num + 2)),
            tokens_in=on_device([*self.given, *[0] * (2 * places)]),  # the first of each row is replaced
            states=on_device(states),
            rows=on_device(table_rows),
            positions=on_device(positions),
        )

    def drafts(self, row: int, allowed: int) -> list[int] | None:
        """None if the row is at its limit."""
        known, limit = int(self.known[row]), int(self.limit[row])
        if known >= limit:
            return None
        room = min(allowed, self.places - 1, limit - known - 1)
        if given := self.given_drafts(row):
            return given[:room]
        return propose_ngram(self.history[row, :known].astype(np.int32), room).tolist()

    def given_drafts(self, row: int) -> list[int]:
        at = self.rows.tolist().index(row)
        return self.given.reshape(-1, self.places)[at, 1 : 1 + self.num_given[at]].tolist()


def suffix_drafts(history: list[int], count: int, longest: int) -> list[int]:
    """What follows the latest of the longest matches, which repeats where the text ends."""
    best, first = 1, len(history)
    for end in range(2, len(history)):
        length = 0
        while length < min(end, longest) and history[end - 1 - length] == history[-1 - length]:
            length += 1
        if length >= 2 and length >= best:
            best, first = length, end
    following = history[first:]
    return [following[place % len(following)] for place in range(count)] if following else []


def predicted_drafts(prediction: list[int], output: list[int], count: int, longest: int) -> list[int]:
    """What follows the first of the longest matches of the output's end; at the beginning the prediction itself."""
    if len(output) < 2:
        return prediction[len(output) :][:count] if prediction[: len(output)] == output else []
    best, first = 1, len(prediction)
    for end in range(2, len(prediction)):
        length = 0
        while length < min(end, longest, len(output)) and prediction[end - 1 - length] == output[-1 - length]:
            length += 1
        if length > best:
            best, first = length, end
    return prediction[first : first + count]


@pytest.mark.parametrize("holds_drafts", [False, True])
def test_a_prediction_goes_before_the_drafter(holds_drafts: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "PREDICTED_MATCH", 4)
    places, seen = 4, {OWN_DRAFTS: 0, PREDICTED: 0}
    for seed in range(16 if interpreted else 200):
        case = Rows(1000 + seed, places)
        texts = [case.rng.integers(0, 3, int(case.rng.choice([1, 2, 5, 40]))) for _ in range(MAX_ROWS)]
        has_text = case.rng.random(MAX_ROWS) < 0.9
        held = [on_device(text) for text in texts]
        addresses = [text.data_ptr() if has else 0 for text, has in zip(held, has_text, strict=True)]
        num_prompt = case.known - np.minimum(case.known, case.rng.choice([0, 1, 2, 9, 30], MAX_ROWS))
        columns = replace(
            case.columns,
            holds_drafts=holds_drafts,
            predicted=PredictedColumns(
                torch.tensor(addresses, device=device), on_device([len(text) for text in texts]), on_device(num_prompt)
            ),
            sources=on_device([7] * MAX_ROWS),
        )
        for _ in range(1 + seed % 2):  # the second time changes nothing
            place_drafts(case.step, columns)
        tokens = case.step.tokens_in.cpu().numpy()[: len(case.rows) * places].reshape(-1, places)
        for at, (row, allowed) in enumerate(zip(case.rows.tolist(), case.max_drafts.tolist(), strict=True)):
            known, limit = int(case.known[row]), int(case.limit[row])
            room = min(allowed, places - 1, limit - known - 1)
            if room <= 0:
                continue
            output, given = case.history[row, num_prompt[row] : known].tolist(), case.given_drafts(row)
            found = predicted_drafts(texts[row].tolist(), output, room, 4) if has_text[row] and not given else []
            own = case.history[row, known : known + room].tolist() if holds_drafts else case.drafts(row, allowed)
            drafts = given[:room] or found or own
            assert tokens[at, 1:].tolist() == drafts + [UNUSED] * (places - 1 - len(drafts))
            source = 7 if given else PREDICTED if found else OWN_DRAFTS
            assert columns.sources[row] == source
            seen[source] = seen.get(source, 0) + 1
    assert min(seen.values()) > 3


@pytest.mark.parametrize("places", [2, 8])
def test_suffix_drafts_follow_the_longest_match(places: int) -> None:
    num_drafted = 0
    for seed in range(12 if interpreted else 200):
        case = Rows(50 * places + seed, places)
        place_drafts(case.step, replace(case.columns, max_match=5, repeats=True))
        tokens = case.step.tokens_in.cpu().numpy()[: len(case.rows) * places].reshape(-1, places)
        for at, (row, allowed) in enumerate(zip(case.rows.tolist(), case.max_drafts.tolist(), strict=True)):
            known, limit = int(case.known[row]), int(case.limit[row])
            if allowed < 0 or known >= limit:
                continue
            history, room = case.history[row, :known].tolist(), min(allowed, places - 1, limit - known - 1)
            drafts = case.given_drafts(row)[:room] or suffix_drafts(history, room, 5)
            num_drafted += len(drafts)
            assert tokens[at].tolist() == [history[-1], *drafts] + [UNUSED] * (places - 1 - len(drafts))
    assert num_drafted > 10


@pytest.mark.parametrize("places", [1, 2, 4, 8])
def test_places_hold_the_last_token_and_ngram_drafts(places: int) -> None:
    num_drafted = 0
    for seed in range(12 if interpreted else 200):
        case = Rows(100 * places + seed, places)
        for _ in range(1 + seed % 2):  # the second time changes nothing
            place_drafts(case.step, case.columns)
        tokens = case.step.tokens_in.cpu().numpy()[: len(case.rows) * places].reshape(-1, places)
        rows, positions = case.step.rows.tolist(), case.step.positions.tolist()
        for at, (row, allowed) in enumerate(zip(case.rows.tolist(), case.max_drafts.tolist(), strict=True)):
            entry = case.entries.start + case.order.tolist().index(at) * places
            own = slice(entry, entry + places)
            if allowed < 0:
                assert tokens[at].tolist() == case.given[at * places : (at + 1) * places].tolist()
                assert (case.step.starts[at], case.step.seq_lens[at]) == (33, 34)
                assert (rows[own], positions[own]) == ([row] * places, [777] * places)
                continue
            drafts = case.drafts(row, allowed)
            used = [] if drafts is None else [int(case.history[row, case.known[row] - 1]), *drafts]
            num_drafted += len(drafts or ())
            start = int(case.known[row]) - 1
            assert tokens[at].tolist() == used + [UNUSED] * (places - len(used))
            assert (case.step.starts[at], case.step.seq_lens[at]) == (start, start + places)
            assert rows[own] == [row] * len(used) + [ENDED] * (places - len(used))
            assert positions[own] == [start + 1 + place for place in range(places)]
        assert rows[: case.entries.start] == [PADDING] * case.entries.start
        assert set(rows[case.entries.stop :]) <= {PADDING}
    assert (num_drafted > 0) == (places > 1)


@pytest.mark.parametrize("places", [1, 2, 4, 8])
def test_tokens_are_accepted_up_to_the_first_wrong_draft(places: int) -> None:
    seen = set()
    for seed in range(12 if interpreted else 200):
        case = Rows(100 * places + seed, places)
        case.max_drafts[case.max_drafts < 0] = 0
        case.step.max_drafts[: len(case.rows)] = on_device(case.max_drafts)
        place_drafts(case.step, case.columns)
        num = len(case.rows)
        drawn = case.rng.integers(0, 6, num * places)
        for at, row in enumerate(case.rows.tolist()):
            for place, draft in enumerate(case.drafts(row, int(case.max_drafts[at])) or ()):
                if case.rng.random() < 0.7:
                    drawn[at * places + place] = draft
        last_tokens = torch.full((MAX_ROWS,), -5, dtype=torch.int64, device=device)
        tokens = AcceptedTokens(
            on_device(case.index), on_device([9, 9, 9, *drawn]), on_device([3]), on_device([-7] * 3 * (num + 2)),
            on_device([2]), last_tokens,
        )  # fmt: skip
        accept_drafts(case.step, case.columns, tokens)
        for at, row in enumerate(case.rows.tolist()):
            drafts, known = case.drafts(row, int(case.max_drafts[at])), int(case.known[row])
            kept: list[int] = []
            own = drawn[at * places : (at + 1) * places].tolist()
            for place, draft in enumerate([None, *drafts] if drafts is not None else []):
                if place and draft != own[place - 1]:
                    break
                kept.append(own[place])
            seen.add(len(kept))
            assert tokens.counts[3 * (2 + at) :][:3].tolist() == [len(kept), len(drafts or ()), OWN_DRAFTS]
            assert case.columns.known[row] == known + len(kept)
            assert case.columns.known[row] <= case.limit[row]
            assert case.columns.history[row, known : known + len(kept)].tolist() == kept
            unchanged = case.columns.history[row, known + len(kept) :].tolist()
            assert unchanged == case.history[row, known + len(kept) :].tolist()
            assert last_tokens[row] == (kept[-1] if kept else -5)
        assert tokens.counts[:6].tolist() == [-7] * 6
    assert seen >= set(range(min(places, 3) + 1))
