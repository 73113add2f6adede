"""The measured tables: every file parses and names its provenance, and lookups return what the files hold."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from helpers.triton_mode import device

from millrace.ops.attention.decode_rule import decode_table
from millrace.ops.linear.cublaslt import measured_product
from millrace.ops.triton.gemm import choice as gemm_choice
from millrace.ops.triton.moe.config import moe_table
from millrace.ops.tuning import load

FILES = sorted(Path(load.__file__).parent.glob("*/*.json"))
CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_a_file_starts_with_its_provenance(path: Path) -> None:
    found = load.read(path.parent.name, path.stem)
    assert next(iter(found)) == "provenance"
    provenance = found["provenance"]
    assert {"machine", "compute_capability", "date", "versions", "measured", "command", "fields"} <= set(provenance)
    assert load.MEASURED[tuple(provenance["compute_capability"])] == path.parent.name
    assert all(isinstance(text, str) for text in provenance["fields"].values())


def test_every_device_has_the_same_files() -> None:
    names = {folder: {path.stem for path in FILES if path.parent.name == folder} for folder in load.MEASURED.values()}
    assert all(found == {"cublaslt", "decode_attention", "gemm", "moe", "steps"} for found in names.values())
    assert load.FALLBACK in names


def test_a_file_is_read_once() -> None:
    for path in FILES:
        assert load.read(path.parent.name, path.stem) is load.read(path.parent.name, path.stem)


def test_a_known_product_gets_the_entry_from_the_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "measured_on", lambda _device: "h200")
    weight = torch.empty(4096, 4096, dtype=torch.bfloat16)
    entries = load.read("h200", "gemm")["bf16"]["4096x4096"]
    tiles = gemm_choice.measured("bf16", weight)
    for rows, entry in entries.items():
        assert tiles.of(int(rows)) == (None if entry is None else gemm_choice.Tiles(*entry)), rows
    assert tiles.of(1) is not None
    entries = load.read("h200", "cublaslt")["bf16"]["4096x4096"]
    product = measured_product(weight)
    # Only a GPU with cuBLASLt would show which entry is used.
    assert product.limits == [int(rows) for rows in entries]
    assert product.entries == [None if entry is None else tuple(entry) for entry in entries.values()]


def test_an_unmeasured_device_has_no_product_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    for capability in ((8, 0), (10, 0)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device, found=capability: found)
        assert load.measured_on(CUDA) is None
        assert load.product_table(CUDA, "gemm", "bf16") == {}
        assert load.rule_table(CUDA, "moe") == load.read(load.FALLBACK, "moe")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: (9, 0))
    assert (4096, 4096) in load.product_table(CUDA, "gemm", "bf16")
    assert load.product_table(CPU, "gemm", "bf16") == {}


def test_limits_of_decode_attention_scale_with_the_multiprocessors(monkeypatch: pytest.MonkeyPatch) -> None:
    from millrace.ops.attention import decode_rule

    found = load.read("h200", "decode_attention")
    table = decode_table(CPU)
    assert table.wide_streams == tuple(found["wide_streams"])
    assert table.few["packed"][0] == (8, (256, 64, 2, 3))
    assert table.list_from == found["list_from"]
    assert table.tiles["plain"][0] == (32, (64, 2, 3))
    assert table.tiles["plain"][-1][0] == decode_rule.ANY_STREAMS
    monkeypatch.setattr(decode_rule, "num_multiprocessors", lambda _device: found["multiprocessors"] // 2)
    half = decode_table.__wrapped__(CPU)
    assert half.wide_streams[1] == found["wide_streams"][1] // 2
    assert half.few["packed"][0] == (4, (128, 64, 2, 3))
    assert half.tiles["plain"][0][1] == table.tiles["plain"][0][1]


def test_the_expert_table_equals_the_file() -> None:
    found, table = load.read("h200", "moe"), moe_table(device)
    assert [limit for limit, _, _ in table.grouped] == [10.0, 20.0, 64.0, float("inf")]
    assert table.grouped[0][1].columns == found["grouped"][0]["gate_up"]["columns"]
    assert table.ahead_bytes == found["ahead_bytes"]
