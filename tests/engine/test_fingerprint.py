"""The digest of the weights depends on their content, not on file names or paths."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from helpers.gguf_files import write_gguf
from safetensors.numpy import save_file

from millrace.engine import fingerprint
from millrace.engine.fingerprint import SAMPLE_BYTES, weights_digest
from millrace.errors import ModelError


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def save(path: Path, seed: int = 0) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(seed)
    save_file({f"layer.{index}": rng.random((64, 100 + index), np.float32) for index in range(5)}, path)
    return path


def data_start(path: Path) -> int:
    return 8 + int.from_bytes(path.read_bytes()[:8], "little")


def flip(path: Path, at: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)
        file.seek(at)
        file.write(bytes([byte[0] ^ 0xFF]))
    os.utime(path, ns=(1, path.stat().st_mtime_ns + 10**9))  # Two writes may fall into one tick of the clock.


def test_a_copy_has_the_same_digest(tmp_path: Path) -> None:
    path = save(tmp_path / "a" / "model.safetensors")
    copy = tmp_path / "b" / "renamed.safetensors"
    copy.parent.mkdir()
    shutil.copy(path, copy)
    assert weights_digest([path]) == weights_digest([copy])


def test_different_values_change_the_digest(tmp_path: Path) -> None:
    assert weights_digest([save(tmp_path / "a.safetensors", 0)]) != weights_digest(
        [save(tmp_path / "b.safetensors", 1)]
    )


@pytest.mark.parametrize("tensor", [0, 2, 4])
@pytest.mark.parametrize("part", ["first", "middle", "last"])
def test_one_changed_byte_in_any_sample_changes_the_digest(tmp_path: Path, tensor: int, part: str) -> None:
    path = save(tmp_path / "model.safetensors")
    before = weights_digest([path])
    sizes = [64 * (100 + index) * 4 for index in range(5)]
    first, size = data_start(path) + sum(sizes[:tensor]), sizes[tensor]
    assert size > 3 * SAMPLE_BYTES
    flip(path, first + {"first": 7, "middle": size // 2, "last": size - 1}[part])
    assert weights_digest([path]) != before


def test_the_digest_depends_on_every_shard_and_their_order(tmp_path: Path) -> None:
    one, two = save(tmp_path / "1.safetensors", 1), save(tmp_path / "2.safetensors", 2)
    assert len({weights_digest(paths) for paths in ([one], [two], [one, two], [two, one], [])}) == 5


def test_gguf_files_are_sampled_too(tmp_path: Path) -> None:
    def digest(name: str, seed: int) -> str:
        values = np.random.default_rng(seed).random((128, 64)).astype(np.float32)
        path = tmp_path / f"{name}.gguf"
        write_gguf(path, {}, {"blk.0.attn_q.weight": values})
        return weights_digest([path])

    assert digest("a", 0) == digest("b", 0)
    assert digest("c", 1) != digest("a", 0)


def test_the_digest_is_cached_until_the_file_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save(tmp_path / "model.safetensors")
    num_computed = 0
    # Counted here: a cached digest is the same digest.
    compute = fingerprint.computed_digest

    def counted(path: Path) -> str:
        nonlocal num_computed
        num_computed += 1
        return compute(path)

    monkeypatch.setattr(fingerprint, "computed_digest", counted)
    before = weights_digest([path])
    assert weights_digest([path]) == before
    assert num_computed == 1
    flip(path, data_start(path))
    assert weights_digest([path]) != before
    assert num_computed == 2


def test_an_unwritable_cache_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save(tmp_path / "model.safetensors")
    expected = weights_digest([path])
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert weights_digest([path]) == expected


def test_a_damaged_header_is_a_model_error(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"\x10\0\0\0\0\0\0\0not json at all!")
    with pytest.raises(ModelError, match="not a readable safetensors file"):
        weights_digest([path])
