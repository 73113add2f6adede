"""KV blocks on a disk, through the engine on a CPU: same tokens, prompts return, also after a restart."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from helpers.engine_stats import stats_after
from helpers.fake_channel import FakeChannel
from helpers.tiny_models import VOCAB, config_of, make_reference

from millrace import LLM, SamplingParams
from millrace.config import load_config
from millrace.engine.build import build_engine
from millrace.engine.disk.files import OpenFile
from millrace.errors import EngineUnavailable
from millrace.link.engine_stats import EngineStats
from millrace.link.messages import Query, Reply

KV_TOKENS, PROMPT, BLOCK, OUTPUT = 512, 96, 16, 8
NUM_PROMPTS = 2 * KV_TOKENS // PROMPT
CHOSEN = SamplingParams(temperature=1.0, seed=5, max_tokens=OUTPUT, ignore_eos=True)


def model(folder: Path, name: str) -> str:
    path = folder / f"{name}.json"
    path.write_text(json.dumps(config_of(make_reference(name))))
    return f"random:{path}"


def prompts() -> list[list[int]]:
    rng = np.random.default_rng(3)
    return [rng.integers(0, VOCAB, PROMPT).tolist() for _ in range(NUM_PROMPTS)]


def engine(source: str, disk: Path | None, **settings: object) -> LLM:
    if disk is not None:
        settings = {"kv_host_gib": 0.01, "kv_disk": str(disk), "kv_disk_gib": 0.05, **settings}
    settings = {"device": "cpu", "dtype": "float32", "kv_tokens": KV_TOKENS, "max_running": 4, **settings}
    return LLM(source, token_budget=64, **settings)


def answers(source: str, disk: Path | None, **settings: object) -> tuple[list[list[int]], list[int], EngineStats]:
    """Output tokens and cached prompt tokens of two rounds, and the engine's statistics at the end."""
    with engine(source, disk, **settings) as llm:
        found = [one for _ in range(2) for one in llm.generate(prompts(), CHOSEN)]
        stats = stats_after(llm, len(found))
    return [one.token_ids for one in found], [one.cached_tokens for one in found], stats


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Has the disks that a server of each model left behind."""
    return tmp_path_factory.mktemp("kv")


@pytest.fixture(scope="module", params=["llama", "gemma3"])
def served(request: pytest.FixtureRequest, folder: Path) -> tuple[str, Path, list[list[int]]]:
    """A model, the directory in which a server left its blocks, and the tokens without one."""
    source, disk = model(folder, request.param), folder / "kv"
    expected, _, _ = answers(source, None)
    first, cached, _ = answers(source, disk)
    assert first == expected
    assert sum(cached[:NUM_PROMPTS]) == 0, "blocks of another model"
    return source, disk, expected


def test_prompts_return_from_the_disk_after_a_restart(served: tuple[str, Path, list[list[int]]]) -> None:
    source, disk, expected = served
    again, cached, stats = answers(source, disk)
    assert again == expected
    assert cached == [PROMPT - BLOCK] * 2 * NUM_PROMPTS
    assert stats.disk_tokens_read >= (NUM_PROMPTS // 2) * (PROMPT - BLOCK)
    assert 0 < stats.disk_blocks_used <= stats.disk_blocks_total
    assert stats.disk_copies_failed == 0


@pytest.mark.parametrize("served", ["llama"], indirect=True)
def test_two_servers_on_one_directory_are_refused_and_other_formats_have_other_files(
    served: tuple[str, Path, list[list[int]]],
) -> None:
    source, disk, _ = served
    with engine(source, disk):
        with pytest.raises(EngineUnavailable, match="Another server keeps KV blocks.*--kv-disk"):
            engine(source, disk)
        _, cached, _ = answers(source, disk, kv_dtype="int8")
        assert sum(cached[:NUM_PROMPTS]) == 0


@pytest.mark.parametrize("served", ["llama"], indirect=True)
@pytest.mark.parametrize("trouble", ["full", "damaged", "vanished"])
def test_a_disk_in_trouble_changes_no_token(
    trouble: str, served: tuple[str, Path, list[list[int]]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, disk, expected = served
    disk = tmp_path if trouble == "full" else disk
    read, count = OpenFile.read, 0

    def fail(*_: object) -> None:
        raise OSError("no space left, or no device")

    def damage(self: OpenFile, offset: int, parts: list[memoryview]) -> None:
        nonlocal count
        read(self, offset, parts)
        count += len(parts[0]) > 1000
        if count % 7 == 1:
            parts[-1][5] ^= 1

    monkeypatch.setattr(OpenFile, "read", {"full": read, "damaged": damage, "vanished": fail}[trouble])
    monkeypatch.setattr(OpenFile, "write", fail)
    found, _, stats = answers(source, disk, kv_host_gib=0.0005)
    assert found == expected
    assert stats.disk_copies_failed > 0


def test_a_directory_that_cannot_be_used_costs_no_answer(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("no directory")
    _, cached, stats = answers(model(folder, "llama"), file)
    assert stats.disk_blocks_total == 0
    assert sum(cached) > 0, "host memory is used"


def test_encrypted_blocks_return_after_a_restart_with_their_key_only(folder: Path, tmp_path: Path) -> None:
    source, tokens, cached = model(folder, "llama"), [], []
    for secret in ("a" * 32, "a" * 32, "b" * 32):
        (tmp_path / "key").write_text(secret)
        found, own, _ = answers(source, tmp_path / "kv", kv_disk_key=str(tmp_path / "key"))
        tokens.append(found)
        cached.append(sum(own[:NUM_PROMPTS]))
    assert tokens[0] == tokens[1] == tokens[2]
    assert cached == [0, NUM_PROMPTS * (PROMPT - BLOCK), 0]
    (tmp_path / "key").write_text("short")
    with pytest.raises(EngineUnavailable, match="5 bytes; write at least 32"):
        engine(source, tmp_path / "kv", kv_disk_key=str(tmp_path / "key"))


def test_what_may_be_kept_on_request_counts_the_disk(folder: Path, tmp_path: Path) -> None:
    disk = {"memory.kv_disk": str(tmp_path), "memory.kv_disk_gib": 0.05}
    limits = []
    for more in ({}, disk):
        channel = FakeChannel([Query(0, 1, "handles", "")])
        chosen = {"model.source": model(folder, "llama"), "memory.kv_host_gib": 0.01, "memory.kv_tokens": KV_TOKENS}
        engine, _ = build_engine(load_config(None, {**chosen, "run.device": "cpu", **more}).config, channel)
        engine.run()
        reply = next(message for _, message in channel.sent if isinstance(message, Reply))
        limits.append(json.loads(reply.body)["max_bytes"])
    assert limits[1] - limits[0] == pytest.approx(0.25 * 0.05 * 2**30, rel=0.05)
