from __future__ import annotations

import pytest

from millrace.sources import suggestion
from millrace.sources.catalogue import find_entry
from millrace.sources.suggestion import suggest


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setattr(suggestion, "has_gpu", lambda: False)
    monkeypatch.setattr(suggestion, "machine_memory", lambda: 16 << 30)
    monkeypatch.setattr(suggestion, "find_local", lambda name: None)
    return monkeypatch


def test_a_small_model_gets_a_larger_one_that_fits(machine: pytest.MonkeyPatch) -> None:
    found = suggest(135_000_000)
    assert found is not None
    entry = find_entry(found.name)
    assert entry is not None
    assert 1 < entry.parameters <= suggestion.MAX_CPU_PARAMETERS
    assert not entry.gated
    assert found.download_bytes > 1e9


def test_a_downloaded_model_comes_first(machine: pytest.MonkeyPatch) -> None:
    machine.setattr(suggestion, "find_local", lambda name: object() if name == "smollm2-360m" else None)
    found = suggest(135_000_000)
    assert found is not None
    assert (found.name, found.download_bytes) == ("smollm2-360m", 0)


@pytest.mark.parametrize(("parameters", "memory"), [(3_000_000_000, 16 << 30), (135_000_000, 1 << 29), (0, 16 << 30)])
def test_no_suggestion_where_none_helps(machine: pytest.MonkeyPatch, parameters: int, memory: int) -> None:
    machine.setattr(suggestion, "machine_memory", lambda: memory)
    assert suggest(parameters) is None
