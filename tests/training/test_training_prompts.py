"""Prompts from files of several forms, and the split into training and held-out prompts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from millrace.errors import ConfigError
from millrace.training.built_in import built_in_prompts
from millrace.training.prompts import hold_out, read_prompts


def written(folder: Path, *rows: object, name: str = "prompts.jsonl") -> Path:
    path = folder / name
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows), encoding="utf-8")
    return path


def test_forms_of_a_prompt(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}], "workload": "code"},
        {"conversations": [{"from": "human", "value": "c"}, {"from": "gpt", "value": "d"}]},
        {"prompt": "e"},
        {"instruction": "f", "input": "g"},
        {"question": "h"},
        {"turns": ["i", "j"], "category": "qa"},
        {"text": "k"},
        '"l"',
    )
    found = read_prompts(path)
    assert [prompt.messages[-1][1] if prompt.messages else prompt.text for prompt in found] == [
        "a", "c", "e", "f\n\ng", "h", "i", "k", "l",
    ]  # fmt: skip
    assert [prompt.workload for prompt in found] == ["code", *["chat"] * 4, "qa", "chat", "chat"]
    assert [prompt.messages for prompt in read_prompts(written(tmp_path, "x", "", "y", name="p.txt"))] == [
        (("user", "x"),),
        (("user", "y"),),
    ]


@pytest.mark.parametrize("row", ["{", {"answer": "x"}, [1], {"messages": [{"role": "user"}]}])
def test_what_is_no_prompt_is_named_with_its_line(row: object, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="line 2"):
        read_prompts(written(tmp_path, {"prompt": "a"}, row))


def test_empty_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no prompts"):
        read_prompts(written(tmp_path, ""))


def test_every_workload_has_held_out_prompts_that_are_not_trained_on() -> None:
    marked = hold_out(built_in_prompts() * 2, seed=1)
    assert len(marked) == len(built_in_prompts())
    for workload in ("chat", "code", "summary", "json"):
        own = [prompt for prompt in marked if prompt.workload == workload]
        assert 2 <= sum(prompt.is_held_out for prompt in own) < len(own) / 4
    assert hold_out(built_in_prompts(), seed=1) == marked
    assert hold_out(built_in_prompts(), seed=2) != marked


def test_too_few_prompts_are_refused() -> None:
    with pytest.raises(ConfigError, match="too few"):
        hold_out(built_in_prompts()[:1], seed=0)
