"""Derives the merges of a SentencePiece BPE vocabulary from its scores.

SentencePiece stores no merges: it joins the neighbouring pieces whose union has the best score. The `tokenizers`
library needs the pairs in order of priority. The order is that of Hugging Face's converter (best score first, then the
longer left piece), so that ids agree in corner cases too, such as runs of spaces.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby

import numpy as np

Merge = tuple[str, str]


def derive_merges(ids: Mapping[str, int], scores: Sequence[float]) -> list[Merge]:
    """Every pair of tokens that forms another token, by priority.

    `ids` maps each token (with `▁` for a space) to its index in `scores`, in ascending order.
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
    """Append the token's splits into two tokens, longest left piece first."""
    for cut in range(len(token) - 1, 0, -1):
        left = token[:cut]
        if left in ids:
            right = token[cut:]
            if right in ids:
                into.append((left, right))


def _equal_scores(tokens: Sequence[str], ids: Mapping[str, int]) -> list[Merge]:
    """Splits of all tokens with the same score, longest left piece first, then longest right piece."""
    merges: list[Merge] = []
    for token in tokens:
        splits: list[Merge] = []
        _splits(token, ids, splits)
        merges += sorted(splits, key=lambda pair: (ids[pair[0]], ids[pair[1]]))
    merges.sort(key=lambda pair: (len(pair[0]), len(pair[1])), reverse=True)
    return merges
