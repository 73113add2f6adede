"""Caches the merges of large SentencePiece vocabularies on disk, since deriving Gemma's takes most of a second.

The file name is a digest of the vocabulary and its scores, so a file is never stale. If a file cannot be read, the
merges are derived again.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from millrace.config import cache_dir
from millrace.text.tokenizers.spm_merges import Merge, derive_merges

MIN_CACHED_TOKENS = 100_000
"""Number of tokens below which deriving is as fast as reading a file."""
_FORMAT = b"1"


def merges_of(ids: Mapping[str, int], scores: Sequence[float]) -> list[Merge]:
    """As `derive_merges`, with a cache on disk for large vocabularies."""
    if len(ids) < MIN_CACHED_TOKENS:
        return derive_merges(ids, scores)
    path = cache_dir() / "merges" / f"{_digest(ids, scores)}.npy"
    pairs = _read(path, len(scores))
    if pairs is not None:
        tokens = [""] * len(scores)
        for token, index in ids.items():
            tokens[index] = token
        return [(tokens[left], tokens[right]) for left, right in zip(*pairs.T.tolist(), strict=True)]
    merges = derive_merges(ids, scores)
    _write(path, np.array([(ids[left], ids[right]) for left, right in merges], dtype=np.int32))
    return merges


def _digest(ids: Mapping[str, int], scores: Sequence[float]) -> str:
    digest = hashlib.blake2b(_FORMAT, digest_size=20)
    digest.update("\0".join(ids).encode("utf-8"))
    digest.update(np.fromiter(ids.values(), np.int64, len(ids)).tobytes())
    digest.update(np.asarray(scores, dtype=np.float64).tobytes())
    return digest.hexdigest()


def _read(path: Path, num_ids: int) -> npt.NDArray[np.int32] | None:
    try:
        pairs: npt.NDArray[np.int32] = np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError):
        return None
    is_valid = pairs.dtype == np.int32 and pairs.ndim == 2 and pairs.shape[1] == 2
    return pairs if is_valid and pairs.size and 0 <= pairs.min() <= pairs.max() < num_ids else None


def _write(path: Path, pairs: npt.NDArray[np.int32]) -> None:
    """Write atomically, since other processes may read or write the same file."""
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with part.open("wb") as file:
            np.save(file, pairs)
        part.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            part.unlink()
