from __future__ import annotations

import msgspec
import pytest
from link.test_engine_client import READY

from millrace.link.engine_stats import EngineStats
from millrace.observe.device_use import device_use
from millrace.observe.history import FrontCounts, Sample


def test_shares_of_the_limits_over_the_last_seconds() -> None:
    stats = EngineStats(**dict.fromkeys(EngineStats.__struct_fields__, 0))
    ready = msgspec.structs.replace(READY, device_bytes_per_s=1000.0, device_flops=0.0)

    def at(second: float, read: float, step: int = 5) -> Sample:
        return Sample(second, msgspec.structs.replace(stats, bytes_read=read, step_no=step), FrontCounts())

    samples = [at(0.0, 0.0), at(100.0, 1e6), at(105.0, 1.002e6), at(110.0, 1.005e6)]

    def shares(*samples: Sample) -> dict[str, float]:
        return {family.name: family.samples[0].value for family in device_use(list(samples), ready)}

    name = "millrace_engine_memory_bandwidth_ratio"
    assert shares(*samples) == {name: pytest.approx(0.5)}, "of the last 10 s"
    before = at(100.0, 1e6, step=9)
    assert shares(before, at(101.0, 5.0, step=1)) == {name: 0.0}, "the engine restarted"
    assert shares(before, at(101.0, 5.0, step=1), at(102.0, 205.0, step=2)) == {name: pytest.approx(0.2)}
    for first in ((), (Sample(100.0, None, FrontCounts()),), (at(100.0, 5.0),)):
        assert shares(*first) == {name: 0.0}, "the first page has it too"
    assert list(device_use(samples, None)) == []
