"""Choosing a version by device, dtype, sizes and determinism, the reasons given, and the table of `millrace ops`."""

from __future__ import annotations

import pytest
import torch

from millrace.commands.ops import print_ops
from millrace.errors import ConfigError
from millrace.ops.registry import OPS, TYPICAL_SHAPE, choose

CPU = torch.device("cpu")


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_op_has_a_version_everywhere(op: str, dtype: torch.dtype) -> None:
    choice = choose(op, CPU, dtype, **TYPICAL_SHAPE)
    assert choice.version.op == op
    assert choice.reason
    on_cuda = [version for version in OPS[op] if "cuda" in version.devices and dtype in version.dtypes]
    assert on_cuda


@pytest.mark.parametrize("op", OPS)
def test_names_are_unique_and_versions_described(op: str) -> None:
    names = [version.name for version in OPS[op]]
    assert len(set(names)) == len(names)
    assert all(version.when and version.op == op for version in OPS[op])


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cpu_is_deterministic_by_default(op: str, dtype: torch.dtype) -> None:
    """The default version is batch-invariant even without `deterministic`."""
    assert choose(op, CPU, dtype, **TYPICAL_SHAPE).version.is_batch_invariant(CPU)
    assert choose(op, CPU, dtype, deterministic=True, **TYPICAL_SHAPE).version.is_batch_invariant(CPU)


def test_a_missing_deterministic_version_is_an_error_that_says_what_to_do() -> None:
    with pytest.raises(ConfigError) as error:
        choose("attention", CPU, torch.float16, deterministic=True, **TYPICAL_SHAPE)
    text = str(error.value)
    assert "attention" in text
    assert "cpu" in text
    assert "is not batch-invariant" in text
    assert "run.deterministic" in text


def test_choice_depends_on_sizes() -> None:
    large = choose("attention", CPU, torch.float32, head_dim=512)
    assert large.version.name == "batched"
    assert "does not support these sizes" in large.reason


def test_table_shows_versions_choice_and_reason(capsys: pytest.CaptureFixture[str]) -> None:
    print_ops(CPU, torch.bfloat16)
    text = capsys.readouterr().out
    for op, versions in OPS.items():
        assert op in text
        assert all(version.name in text for version in versions)
    assert text.count("*") >= len(OPS)
    assert "unavailable: runs only on cuda" in text


def test_table_says_when_no_version_fits(capsys: pytest.CaptureFixture[str]) -> None:
    print_ops(CPU, torch.float16, deterministic=True)
    assert "no version of attention supports these settings" in capsys.readouterr().out
