"""Limits of known GPUs come from the table; limits of unknown GPUs are computed, and are close to the table's."""

from __future__ import annotations

import pytest

from millrace.host import device_limits as module
from millrace.host.device_limits import STEP_SHARE, DeviceLimits, DeviceProperties, computed_limits, device_limits


def test_the_h200_keeps_its_measured_rate() -> None:
    limits = device_limits("NVIDIA H200")
    assert limits.step_flops == 600e12
    assert limits.flops == 989.4e12
    assert limits.bytes_per_s == 4.8e12


def test_an_unmeasured_device_gets_a_fraction_of_its_data_sheet_rate() -> None:
    assert device_limits("NVIDIA L4") == DeviceLimits(121e12, 0.3e12, STEP_SHARE * 121e12)


def test_every_entry_is_complete_and_plausible() -> None:
    for name in module.known_devices():  # The table of the package, which has no public list of its names.
        limits = device_limits(name)
        assert 0.5 * limits.flops <= limits.step_flops < limits.flops, name
        assert 50 < limits.flops / limits.bytes_per_s < 500, name


@pytest.mark.parametrize(
    ("name", "properties"),
    [
        ("NVIDIA H200", DeviceProperties((9, 0), 132, 1_830_000, 3_201_000, 6144)),
        ("NVIDIA A100-SXM4-80GB", DeviceProperties((8, 0), 108, 1_410_000, 1_593_000, 5120)),
        ("NVIDIA GeForce RTX 4090", DeviceProperties((8, 9), 128, 2_520_000, 10_501_000, 384)),
        ("NVIDIA GeForce RTX 3090", DeviceProperties((8, 6), 82, 1_695_000, 9_751_000, 384)),
        ("Tesla T4", DeviceProperties((7, 5), 40, 1_590_000, 5_001_000, 256)),
    ],
)
def test_computed_limits_come_close_to_the_table(name: str, properties: DeviceProperties) -> None:
    known, computed = device_limits(name), computed_limits(properties)
    assert computed.flops == pytest.approx(known.flops, rel=0.02)
    assert computed.bytes_per_s == pytest.approx(known.bytes_per_s, rel=0.03)


def test_an_unknown_device_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    properties = DeviceProperties((99, 0), 10, 1_000_000, 1_000_000, 256)
    monkeypatch.setattr(module, "read_properties", lambda index: properties)
    assert device_limits("NVIDIA Something New") == computed_limits(properties)
    assert computed_limits(properties).flops == 10 * 1e9 * module.UNKNOWN_FLOPS_PER_CLOCK


def test_a_device_whose_driver_reports_nothing_has_no_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "read_properties", lambda index: None)
    assert device_limits("Something") == DeviceLimits(0.0, 0.0, 0.0)
