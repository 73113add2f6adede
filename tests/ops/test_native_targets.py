"""Which prebuilt kernels a processor gets."""

from __future__ import annotations

from pathlib import Path

import pytest

from millrace.ops.cpp import targets
from millrace.ops.cpp.targets import TARGETS, prebuilt_target, processor_features

BY_NAME = {target.name: target for target in TARGETS}


@pytest.fixture
def _wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(targets, "PREBUILT", tmp_path)
    for target in TARGETS:
        target.path.touch()


@pytest.mark.usefixtures("_wheel")
@pytest.mark.parametrize("name", ["amx", "avx512-bf16", "avx512-vnni", "avx512", "avx2-vnni", "avx2"])
def test_a_processor_gets_the_best_kernels_that_it_can_run(name: str) -> None:
    features = BY_NAME[name].features | {"other"}
    found = prebuilt_target(features, "x86_64")
    assert found is not None
    assert found.name == name
    assert prebuilt_target(features, "aarch64") is None


@pytest.mark.usefixtures("_wheel")
@pytest.mark.parametrize(
    ("features", "name"), [({"i8mm", "bf16", "sve"}, "armv8.6"), ({"i8mm"}, "armv8.2"), (set(), "armv8.2")]
)
def test_an_arm_processor_gets_matrix_products_if_it_has_all_of_them(features: set[str], name: str) -> None:
    found = prebuilt_target(frozenset({"asimd", "asimddp", "asimdhp", *features}), "aarch64")
    assert found is not None
    assert found.name == name
    assert prebuilt_target(frozenset({"asimd", *features}), "aarch64") is None


@pytest.mark.usefixtures("_wheel")
def test_an_old_processor_gets_none() -> None:
    assert prebuilt_target(frozenset({"sse2", "avx"}), "x86_64") is None


def test_a_checkout_has_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(targets, "PREBUILT", tmp_path)
    assert prebuilt_target(processor_features()) is None
