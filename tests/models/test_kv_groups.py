"""KV groups: how layers are grouped, and a grouped model against `transformers` and against one group."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers.inside import without_compiler
from helpers.paged import PagedDriver, make_grouped_batch
from helpers.tiny_models import VOCAB, StateDictSource, config_of, make_reference

from millrace.models.decoder import Decoder
from millrace.models.load import build_decoder
from millrace.models.spec.families import spec_from_config
from millrace.models.spec.kv_groups import MAX_GROUPS, group_by_window
from millrace.run.device.device import CpuDevice
from millrace.run.device.kv_pool import allocate_kv, bytes_per_token
from millrace.run.table.inputs import last_tokens

CPU = torch.device("cpu")
WINDOWED = ["gemma3", "gemma2", "qwen2_window", "smollm3_window", "mistral_window", "mixtral_window"]


def load(case: str, dtype: torch.dtype = torch.float32, *, grouped: bool = True) -> tuple[Any, Decoder]:
    model = make_reference(case)
    spec = replace(spec_from_config(config_of(model)), has_kv_groups=grouped)
    return model, build_decoder(spec, StateDictSource.of(model), device=CPU, dtype=dtype)


@pytest.mark.parametrize(
    ("num_full", "num_windowed", "page_layers", "num_groups"),
    [
        (28, 0, 28, 1),
        (0, 32, 32, 1),
        (3, 15, 3, 6),  # Gemma 3 270M
        (4, 22, 4, 7),  # 1B: two places of the window groups are empty
        (5, 29, 5, 7),  # 4B: one
        (8, 40, 8, 6),
        (10, 52, 5, 13),  # 27B: with ten places, 15% of the window groups would be empty
        (21, 21, 21, 2),
        (1, 2, 1, 3),
        (1, 40, 3, 15),  # one place would need 41 groups; here the full layer wastes two places
    ],
)
def test_layers_are_grouped_by_window(num_full: int, num_windowed: int, page_layers: int, num_groups: int) -> None:
    windows: list[int | None] = [None] * num_full + [512] * num_windowed
    random.Random(0).shuffle(windows)
    groups = group_by_window(windows)
    assert (groups.page_layers, groups.num_groups) == (page_layers, num_groups)
    assert len(set(groups.places)) == len(windows)
    assert [groups.windows[group] for group, _ in groups.places] == windows
    assert all(0 <= index < page_layers for _, index in groups.places)
    assert list(groups.windows) == sorted(groups.windows, key=lambda window: window or 0)


def test_more_windows_than_groups() -> None:
    windows = [window for window in range(1, MAX_GROUPS + 3) for _ in range(2)]
    assert group_by_window(windows).num_groups == MAX_GROUPS + 2


def test_without_groups_all_layers_share_a_table() -> None:
    groups = load("gemma3", grouped=False)[1].spec.kv_groups
    assert groups.windows == (None,)
    assert groups.places == tuple((0, layer) for layer in range(7))


@pytest.mark.parametrize("has_compiler", [True, False])
@pytest.mark.parametrize("case", WINDOWED)
def test_logits_equal_transformers(case: str, has_compiler: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of different lengths grow side by side, and blocks behind the windows are reused."""
    if not has_compiler:
        without_compiler(monkeypatch)
    model, decoder = load(case)
    texts = [random.Random(length).choices(range(VOCAB), k=length) for length in (40, 31, 17)]
    driver = PagedDriver(decoder, block_size=3)
    found: list[list[torch.Tensor]] = [[] for _ in texts]
    done, draw = [0] * len(texts), random.Random(case)
    while any(count < len(text) for count, text in zip(done, texts, strict=True)):
        rows = []
        for index, text in enumerate(texts):
            tokens = text[done[index] : done[index] + draw.choice((0, 1, 1, 1, 4, 9))]
            done[index] += len(tokens)
            if tokens:
                rows.append((index, tokens))
        if rows:
            for (index, _), logits in zip(rows, driver.step(rows), strict=True):
                found[index].append(logits)
    for text, ours in zip(texts, found, strict=True):
        with torch.no_grad():
            theirs = model(torch.tensor([text])).logits[0]
        torch.testing.assert_close(torch.cat(ours), theirs, atol=1e-4, rtol=1e-4)


def test_blocks_behind_windows_are_freed() -> None:
    _, decoder = load("gemma3")
    tokens = random.Random(0).choices(range(VOCAB), k=80)
    driver = PagedDriver(decoder, block_size=4)
    driver.run(0, tokens, 1)
    assert decoder.spec.kv_groups.windows == (None, *[6] * 6)
    assert driver.num_used <= 20 + 6 * 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", ["gemma3", "gemma2", "qwen2_window"])
def test_grouping_changes_nothing(case: str, dtype: torch.dtype) -> None:
    """Bit-equal to one group, natively and op by op, with all tokens and with the last ones only."""
    _, plain = load(case, dtype, grouped=False)
    _, grouped = load(case, dtype)
    assert (grouped.native_stack is None) == (plain.native_stack is None)
    num_groups = grouped.spec.kv_groups.num_groups
    draw = random.Random(case)
    free = list(range(1, 256))
    draw.shuffle(free)
    lists = [[[free.pop() for _ in range(8)] for _ in range(num_groups)] for _ in range(3)]
    kv = {name: PagedDriver(own, 5).kv for name, own in (("plain", plain), ("native", grouped), ("ops", grouped))}
    computed, device = [0] * 3, CpuDevice(1)
    for step in range(6):
        counts = [draw.choice((1, 1, 3, 7)) for _ in range(3)]
        rows = [
            (draw.choices(range(VOCAB), k=count), computed[index], lists[index]) for index, count in enumerate(counts)
        ]
        batch = make_grouped_batch(rows, 5)
        single = make_grouped_batch([(tokens, before, blocks[:1]) for tokens, before, blocks in rows], 5)
        if step % 2:
            due = torch.tensor([0, 2]).numpy()
            batch.last, single.last = last_tokens(batch, due, device), last_tokens(single, due, device)
        wanted = plain.forward(single, kv["plain"])
        assert wanted.isfinite().all()
        assert torch.equal(grouped.forward(batch, kv["native"]), wanted)
        assert torch.equal(grouped.run_layers(batch, kv["ops"]), wanted)
        computed = [before + count for before, count in zip(computed, counts, strict=True)]


def test_tables_of_too_few_groups_are_refused() -> None:
    _, decoder = load("gemma3")
    if decoder.native_stack is None:
        pytest.skip("there are no native kernels here")
    with pytest.raises(ValueError, match="1 KV groups, the model 7"):
        decoder.forward(make_grouped_batch([([1, 2], 0, [[1]])], 4), PagedDriver(decoder).kv)


def test_the_pool_has_one_tensor_per_place() -> None:
    _, decoder = load("gemma3")
    spec = decoder.spec
    kv = allocate_kv(spec, num_blocks=9, block_size=4, dtype=torch.float32, device=CPU)
    assert [layer.shape for layer in kv] == [spec.kv_shape(10, 4)] * spec.kv_groups.page_layers
    assert sum(layer.nbytes for layer in kv) == 10 * 4 * bytes_per_token(spec, torch.float32)
    whole = bytes_per_token(replace(spec, has_kv_groups=False), torch.float32)
    assert bytes_per_token(spec, torch.float32) * spec.num_layers == whole * spec.kv_groups.page_layers
