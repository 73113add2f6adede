"""Merges of a SentencePiece BPE vocabulary, recovered from its scores.

Such a vocabulary stores no merges: it always joins the neighbouring pieces whose union has the best score. The
`tokenizers` library wants the pairs in order of priority instead. The order below is the one Hugging Face's own
conversion writes into tokenizer.json (best score first, then the longer left piece), so that ids agree in the
corners too, such as runs of spaces.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby

import numpy as np

Merge = tuple[str, str]


def derive_merges(ids: Mapping[str, int], scores: Sequence[float]) -> list[Merge]:
    """Every way to build a token from two others, by priority.

    `ids` maps each token, spelled with `▁` for a space, to its place in `scores`, in ascending order.
    """
    tokens = list(ids)
    own_scores = [scores[index] for index in ids.values()]
    best_first = np.argsort(-np.asarray(own_scores, dtype=np.float64), kind="stable").tolist()
    merges: list[Merge] = []
    for _, group in groupby(best_first, key=own_scores.__getitem__):
        equals = list(group)
        if len(equals) == 1:
            _splits(tokens[equals[0]], ids, merges)
        else:
            merges += _equal_scores([tokens[place] for place in equals], ids)
    return merges


def _splits(token: str, ids: Mapping[str, int], into: list[Merge]) -> None:
    """Append the token's splits, the longest left piece first."""
    for cut in range(len(token) - 1, 0, -1):
        left = token[:cut]
        if left in ids:
            right = token[cut:]
            if right in ids:
                into.append((left, right))


def _equal_scores(tokens: Sequence[str], ids: Mapping[str, int]) -> list[Merge]:
    """Splits of tokens with one score: by length of the left piece, then of the right, across all of them."""
    merges: list[Merge] = []
    for token in tokens:
        own: list[Merge] = []
        _splits(token, ids, own)
        merges += sorted(own, key=lambda pair: (ids[pair[0]], ids[pair[1]]))
    merges.sort(key=lambda pair: (len(pair[0]), len(pair[1])), reverse=True)
    return merges
