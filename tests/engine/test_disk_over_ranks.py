"""KV blocks on a disk, of a model split over ranks: each rank has its share, and a block is there if all have it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.engine_stats import stats_after
from helpers.tiny_models import VOCAB, config_of, make_reference

from millrace import LLM, SamplingParams
from millrace.link.engine_stats import EngineStats

pytestmark = [pytest.mark.live, pytest.mark.timeout(600)]

KV_TOKENS, PROMPT, BLOCK, NUM_PROMPTS = 512, 96, 16, 8
CHOSEN = SamplingParams(temperature=1.0, seed=5, max_tokens=8, ignore_eos=True)


def answers(
    folder: Path, num_ranks: int, disk: Path | None, **more: object
) -> tuple[list[list[int]], int, EngineStats]:
    """Output tokens, cached prompt tokens, and the statistics at the end."""
    rng = np.random.default_rng(3)
    prompts = [rng.integers(0, VOCAB, PROMPT).tolist() for _ in range(NUM_PROMPTS)]
    source = folder / "llama.json"
    source.write_text(json.dumps(config_of(make_reference("llama"))))
    if disk is not None:
        more |= {"kv_host_gib": 0.01, "kv_disk": str(disk), "kv_disk_gib": 0.05}
    settings: dict[str, Any] = {
        "device": "cpu",
        "dtype": "float32",
        "kv_tokens": KV_TOKENS,
        "max_running": 4,
        "token_budget": 64,
    }
    with LLM(f"random:{source}", tensor_parallel=num_ranks, **settings, **more) as llm:
        found = llm.generate(prompts, CHOSEN)
        stats = stats_after(llm, len(found))
    return [one.token_ids for one in found], sum(one.cached_tokens for one in found), stats


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[list[int]]]:
    """The directory in which two ranks left their shares, and the tokens of one rank without a disk."""
    folder = tmp_path_factory.mktemp("kv")
    expected, _, _ = answers(folder, 1, None)
    found, cached, stats = answers(folder, 2, folder / "kv")
    assert found == expected
    assert cached == 0
    assert stats.disk_blocks_total > 0
    return folder / "kv", expected


@pytest.fixture
def disk(stored: tuple[Path, list[list[int]]], tmp_path: Path) -> Path:
    return shutil.copytree(stored[0], tmp_path / "kv")


def share(disk: Path, name: str) -> Path:
    """A file of rank 1."""
    (folder,) = disk.glob("*-rank1")
    return folder / name


def test_prompts_return_after_a_restart(stored: tuple[Path, list[list[int]]], disk: Path, tmp_path: Path) -> None:
    found, cached, stats = answers(tmp_path, 2, disk)
    assert found == stored[1]
    assert cached == NUM_PROMPTS * (PROMPT - BLOCK)
    assert stats.disk_tokens_read >= cached
    assert stats.disk_copies_failed == 0


def lose_half(disk: Path) -> None:
    entries = share(disk, "entries")
    entries.write_bytes(entries.read_bytes()[: entries.stat().st_size // 2])


def damage(disk: Path) -> None:
    blocks = share(disk, "blocks")
    content = bytearray(blocks.read_bytes())
    content[:: len(content) // 64] = bytes(each ^ 1 for each in content[:: len(content) // 64])
    blocks.write_bytes(content)


@pytest.mark.parametrize("harm", [lose_half, damage])
def test_a_block_that_one_rank_lacks_is_not_there(
    harm: Callable[[Path], None], stored: tuple[Path, list[list[int]]], disk: Path, tmp_path: Path
) -> None:
    harm(disk)
    found, cached, stats = answers(tmp_path, 2, disk)
    assert found == stored[1]
    assert cached < NUM_PROMPTS * (PROMPT - BLOCK)
    assert bool(stats.disk_copies_failed) == (harm is damage)


def test_without_a_share_of_one_rank_there_is_no_disk(
    stored: tuple[Path, list[list[int]]], disk: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = share(disk, "entries").parent
    shutil.rmtree(folder)
    folder.write_text("no directory")
    found, _, stats = answers(tmp_path, 2, disk)
    assert found == stored[1]
    assert stats.disk_blocks_total == 0
    assert "a rank cannot store its part" in caplog.text
