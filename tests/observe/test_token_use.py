from __future__ import annotations

import msgspec

from millrace.link.engine_stats import EngineStats
from millrace.observe.history import FrontCounts, Sample, engine_series
from millrace.observe.token_use import token_use


def stats(**counts: int) -> EngineStats:
    return msgspec.structs.replace(EngineStats(*[0] * 13), **counts)


def test_computed_tokens_are_useful_or_wasted_for_one_cause() -> None:
    use = token_use(
        stats(
            prefill_tokens=100,
            decode_tokens=50,
            padded_tokens=7,
            drafted_tokens=20,
            accepted_tokens=15,
            recomputed_tokens=11,
            discarded_tokens=30,
        )
    )
    assert use.computed == 177
    assert use.wasted == {"cancelled": 30, "rejected_drafts": 5, "recomputed": 11, "padding": 7}
    assert use.useful + sum(use.wasted.values()) == use.computed


def test_series_have_the_shares_of_each_interval() -> None:
    ends = [
        stats(step_no=1),
        stats(step_no=2, decode_tokens=80, padded_tokens=20),
        stats(step_no=3, decode_tokens=80, padded_tokens=20),
    ]
    series = engine_series([Sample(5.0 * at, one, FrontCounts()) for at, one in enumerate(ends)], 5)
    assert series["goodput_share"] == [0.8, None]
    assert series["wasted_share"]["padding"] == [0.2, None]
    assert series["wasted_share"]["cancelled"] == [0.0, None]
