"""The GGUF reader against the gguf package's own, and against damaged and hostile files."""

from __future__ import annotations

import os
import struct
import sys
import tracemalloc
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as T
from helpers.gguf_files import write_gguf
from helpers.suite import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.errors import ModelError
from millrace.sources.gguf.model import open_gguf_model
from millrace.sources.gguf.reader import read_gguf


def pack_string(text: bytes | str) -> bytes:
    raw = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(raw)) + raw


def pack_file(pairs: Sequence[bytes] = (), tensors: Sequence[bytes] = (), data: bytes = b"", version: int = 3) -> bytes:
    head = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(pairs)) + b"".join(pairs) + b"".join(tensors)
    return head + b"\0" * (-len(head) % 32) + data


def pack_tensor(name: str, dims: list[int], kind: int = 0, offset: int = 0) -> bytes:
    return pack_string(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rng = np.random.default_rng(1)
    metadata: dict[str, Any] = {
        "llama.block_count": 3,
        "llama.rope.freq_base": 1e6,
        "general.name": "päckchen 🎒",
        "flag": True,
        "tokenizer.ggml.tokens": ["<s>", "a", "é", "日本", ""],
        "tokenizer.ggml.scores": [0.0, -1.5, 2.25, 1e-9, -3.0],
        "numbers": [1, -2, 3],
    }
    tensors: dict[str, Any] = {
        "a.weight": rng.standard_normal((4, 64), dtype=np.float32),
        "b.weight": (rng.integers(0, 256, (6, 2 * 18), dtype=np.uint8), T.Q4_0),
        "c.bias": np.arange(7, dtype=np.float32),
        "d.weight": (rng.integers(0, 256, (2, 3, 144), dtype=np.uint8), T.Q4_K),
    }
    return write_gguf(tmp_path_factory.mktemp("gguf") / "sample.gguf", metadata, tensors)


def test_metadata_and_tensors_equal_those_of_the_gguf_package(sample: Path) -> None:
    ours, theirs = read_gguf(sample), gguf.GGUFReader(sample)
    for key, field in theirs.fields.items():
        if not key.startswith("GGUF."):
            assert ours.metadata[key] == field.contents(), key
    assert list(ours.tensors) == [tensor.name for tensor in theirs.tensors]
    for tensor in theirs.tensors:
        found = ours.tensors[tensor.name]
        assert found.shape == tuple(reversed(tensor.shape.tolist()))
        assert (found.type, found.offset, found.num_bytes) == (
            tensor.tensor_type,
            tensor.data_offset,
            tensor.n_bytes,
        )
        np.testing.assert_array_equal(ours.data(tensor.name), tensor.data.reshape(-1).view(np.uint8))


def test_every_scalar_type_and_nested_arrays(tmp_path: Path) -> None:
    values = [(0, "B", 200), (1, "b", -5), (2, "H", 60000), (3, "h", -3), (4, "I", 2**32 - 1), (5, "i", -(2**31))]
    values += [(10, "Q", 2**64 - 1), (11, "q", -(2**63)), (6, "f", 0.5), (12, "d", 0.1), (7, "B", 1)]
    pairs = [pack_string(f"k{kind}") + struct.pack(f"<I{code}", kind, value) for kind, code, value in values]
    inner = struct.pack("<IQ3h", 3, 3, 1, -2, 3)
    pairs.append(pack_string("nested") + struct.pack("<IIQ", 9, 9, 2) + inner + inner)
    pairs.append(pack_string("flags") + struct.pack("<IIQ3B", 9, 7, 3, 1, 0, 1))
    path = tmp_path / "types.gguf"
    path.write_bytes(pack_file(pairs))
    found = read_gguf(path).metadata
    for kind, _, value in values:
        assert found[f"k{kind}"] == value
    assert found["k7"] is True
    assert found["nested"] == [[1, -2, 3], [1, -2, 3]]
    assert found["flags"] == [True, False, True]


def test_version_2_is_read_and_others_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "v.gguf"
    path.write_bytes(pack_file(version=2))
    assert read_gguf(path).tensors == {}
    for version in (0, 1, 4):
        path.write_bytes(pack_file(version=version))
        with pytest.raises(ModelError, match=f"version {version}"):
            read_gguf(path)
    path.write_bytes(b"GGUF" + struct.pack(">IQQ", 3, 0, 0))
    with pytest.raises(ModelError, match="big-endian"):
        read_gguf(path)


def test_missing_empty_and_foreign_files(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no file"):
        read_gguf(tmp_path / "absent.gguf")
    with pytest.raises(ModelError, match="cannot be opened"):
        read_gguf(tmp_path)
    path = tmp_path / "odd.gguf"
    path.write_bytes(b"")
    with pytest.raises(ModelError, match="empty"):
        read_gguf(path)
    for content in (b"G", b"GGUF", b"PK\x03\x04" + b"\0" * 100):
        path.write_bytes(content)
        with pytest.raises(ModelError, match="not a valid GGUF"):
            read_gguf(path)


HOSTILE = {
    "tensor count": b"GGUF" + struct.pack("<IQQ", 3, 2**63, 0),
    "pair count": b"GGUF" + struct.pack("<IQQ", 3, 0, 2**64 - 1),
    "key length": b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 2**62) + b"x" * 64,
    "string length": pack_file([pack_string("k") + struct.pack("<IQ", 8, 2**61)]),
    "array count": pack_file([pack_string("k") + struct.pack("<IIQ", 9, 4, 2**60)]),
    "string array count": pack_file([pack_string("k") + struct.pack("<IIQ", 9, 8, 2**40) + b"\0" * 64]),
    "item length": pack_file([pack_string("k") + struct.pack("<IIQQ", 9, 8, 1, 2**64 - 1)]),
    "value type": pack_file([pack_string("k") + struct.pack("<IQ", 77, 1)]),
    "item type": pack_file([pack_string("k") + struct.pack("<IIQ", 9, 77, 1)]),
    "deep nesting": pack_file([pack_string("k") + struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 5000]),
    "not UTF-8": pack_file([pack_string("k") + struct.pack("<I", 8) + pack_string(b"\xff\xfe")]),
    "item not UTF-8": pack_file([pack_string("k") + struct.pack("<IIQ", 9, 8, 1) + pack_string(b"\xff")]),
    "key twice": pack_file([pack_string("k") + struct.pack("<IB", 0, 1)] * 2),
    "dimensions": pack_file(tensors=[pack_tensor("t", [1] * 5)]),
    "no dimensions": pack_file(tensors=[pack_tensor("t", [])]),
    "zero dimension": pack_file(tensors=[pack_tensor("t", [4, 0])]),
    "huge dimension": pack_file(tensors=[pack_tensor("t", [2**63, 2**63])]),
    "tensor type": pack_file(tensors=[pack_tensor("t", [32], kind=250)], data=b"\0" * 1024),
    "removed tensor type": pack_file(tensors=[pack_tensor("t", [32], kind=4)], data=b"\0" * 1024),
    "offset": pack_file(tensors=[pack_tensor("t", [8], offset=2**62)], data=b"\0" * 64),
    "unaligned offset": pack_file(tensors=[pack_tensor("t", [2], offset=3)], data=b"\0" * 64),
    "ends late": pack_file(tensors=[pack_tensor("t", [100])], data=b"\0" * 64),
    "row length": pack_file(tensors=[pack_tensor("t", [33], kind=2)], data=b"\0" * 64),
    "tensor twice": pack_file(tensors=[pack_tensor("t", [2])] * 2, data=b"\0" * 64),
    "alignment 0": pack_file([pack_string("general.alignment") + struct.pack("<II", 4, 0)]),
    "alignment odd": pack_file([pack_string("general.alignment") + struct.pack("<II", 4, 48)]),
    "alignment text": pack_file([pack_string("general.alignment") + struct.pack("<I", 8) + pack_string("32")]),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_files_are_refused_before_memory_is_allocated(tmp_path: Path, case: str) -> None:
    path = tmp_path / "hostile.gguf"
    path.write_bytes(HOSTILE[case])
    tracemalloc.start()
    try:
        with pytest.raises(ModelError) as caught:
            read_gguf(path)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert str(path) in str(caught.value)
    assert peak_bytes < 10_000_000


def test_a_file_cut_at_any_byte_is_refused(sample: Path, tmp_path: Path) -> None:
    content = sample.read_bytes()
    path = tmp_path / "cut.gguf"
    last = max(tensor.offset + tensor.num_bytes for tensor in read_gguf(sample).tensors.values())
    path.write_bytes(content[:last])
    for length in reversed([*range(1500), *range(1500, last, 37)]):
        os.truncate(path, min(length, last - 1))
        with pytest.raises(ModelError):
            read_gguf(path)


@settings(max_examples=examples(120))
@given(data=st.data())
def test_flipped_bytes_are_refused_or_read_within_bounds(sample: Path, data: st.DataObject) -> None:
    content = bytearray(sample.read_bytes())
    spots = st.integers(0, min(len(content), 1600) - 1)
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(spots)] = data.draw(st.integers(0, 255))
    path = sample.with_name("flipped.gguf")
    path.write_bytes(content)
    try:
        found = read_gguf(path)
    except ModelError:
        return
    for name, tensor in found.tensors.items():
        assert found.data(name).nbytes == tensor.num_bytes


@settings(max_examples=examples(80))
@given(tail=st.binary(max_size=400), head=st.sampled_from([b"", b"GGUF", b"GGUF\x03\0\0\0"]))
def test_random_bytes_are_refused_or_read(tmp_path_factory: pytest.TempPathFactory, head: bytes, tail: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / "random.gguf"
    path.write_bytes(head + tail)
    try:
        read_gguf(path)
    except ModelError:
        pass


def test_a_large_vocabulary_is_read_without_a_call_per_token(tmp_path: Path) -> None:
    tokens = [f"token_{index}é" for index in range(20_000)]
    strings = b"".join(pack_string(token) for token in tokens)
    pairs = [pack_string("tokens") + struct.pack("<IIQ", 9, 8, len(tokens)) + strings]
    pairs.append(pack_string("scores") + struct.pack("<IIQ", 9, 6, len(tokens)) + b"\0" * 4 * len(tokens))
    path = tmp_path / "vocabulary.gguf"
    path.write_bytes(pack_file(pairs))
    num_calls = 0

    def count(frame: object, event: str, argument: object) -> None:
        nonlocal num_calls
        num_calls += event == "call"

    sys.setprofile(count)
    try:
        found = read_gguf(path)
    finally:
        sys.setprofile(None)
    assert found.metadata["tokens"] == tokens
    assert num_calls < len(tokens) / 10, "calls of Python functions"


# --- models split into several files ---


def split(tmp_path: Path, count: int = 3) -> list[Path]:
    paths = []
    for index in range(count):
        path = tmp_path / f"toy-{index + 1:05}-of-{count:05}.gguf"
        metadata = {"split.no": index, "split.count": count}
        write_gguf(path, metadata, {f"blk.{index}.attn_norm.weight": np.full(8, index, dtype=np.float32)})
        paths.append(path)
    return paths


def test_a_split_model_is_one_model(tmp_path: Path) -> None:
    paths = split(tmp_path)
    model = open_gguf_model(paths[0])
    assert [file.path for file in model.files] == paths
    assert model.file_of("blk.2.attn_norm.weight").path == paths[2]
    assert model.data("blk.1.attn_norm.weight").view(np.float32)[0] == 1.0


def test_a_split_model_with_a_part_missing_renamed_or_repeated_is_refused(tmp_path: Path) -> None:
    paths = split(tmp_path)
    with pytest.raises(ModelError, match=r"part 2 of 3; give the first part, toy-00001-of-00003.gguf"):
        open_gguf_model(paths[1])
    other = paths[0].rename(tmp_path / "other.gguf")
    with pytest.raises(ModelError, match="one of 3 parts"):
        open_gguf_model(other)
    other.rename(paths[0])
    paths[2].write_bytes(paths[1].read_bytes())
    with pytest.raises(ModelError, match="more than one"):
        open_gguf_model(paths[0])
    paths[2].unlink()
    with pytest.raises(ModelError, match="toy-00003-of-00003.gguf is missing"):
        open_gguf_model(paths[0])
