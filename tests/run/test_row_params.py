"""What a request's sampling parameters mean, as the columns that every sampler reads."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import numpy as np
import pytest

from millrace.params.draws import DrawParams
from millrace.params.grammar import Grammar, ThinkingLimit
from millrace.params.rows import RowParams
from millrace.params.sampling import SamplingParams
from millrace.plan.step import Admission
from millrace.run.sampling.row_params import RowParamTable, RowValues

VOCAB = 100


def admit(params: SamplingParams, ends: tuple[int, ...] = (7,)) -> tuple[RowParamTable, RowValues]:
    table = RowParamTable(max_rows=4, vocab_size=VOCAB)
    return table, table.admit(Admission(2, 9, np.arange(5, dtype=np.int32), 3, RowParams(params, ends)))


def test_columns_equal_the_values() -> None:
    table, values = admit(SamplingParams(temperature=0.5, top_k=9, top_p=0.75, min_p=0.25, seed=-1, min_tokens=4))
    assert values.seed == 2**64 - 1
    assert values.ends_from == 3 + 4
    for name in (*RowValues._fields, "needs_logits", "is_adjusted"):
        assert getattr(table, name)[2] == getattr(values, name), name
        assert getattr(table, name)[1] == getattr(RowParamTable(max_rows=2, vocab_size=VOCAB), name)[1], name


@pytest.mark.parametrize(
    ("params", "needs_logits", "is_adjusted"),
    [
        (SamplingParams(temperature=0), False, False),
        (SamplingParams(temperature=1e-7, top_k=3), False, False),
        (SamplingParams(temperature=0.7), True, False),
        (SamplingParams(temperature=0, min_tokens=2), False, True),
        (SamplingParams(temperature=0, logprobs=0), True, True),
        (SamplingParams(temperature=0, logit_bias=((1, 2.0),)), True, True),
        (SamplingParams(temperature=0, repetition_penalty=1.1), True, True),
        (SamplingParams(temperature=0, presence_penalty=0.1), True, True),
        (SamplingParams(temperature=0, frequency_penalty=0.1), True, True),
    ],
)
def test_which_rows_need_logits(params: SamplingParams, needs_logits: bool, is_adjusted: bool) -> None:
    _, values = admit(params)
    assert (values.needs_logits, values.is_adjusted) == (needs_logits, is_adjusted)


def test_values_without_effect_are_neutral() -> None:
    assert admit(SamplingParams(top_k=VOCAB))[1].top_k == 0
    assert admit(SamplingParams(top_k=VOCAB - 1))[1].top_k == VOCAB - 1
    assert admit(SamplingParams(temperature=9e-6))[1].temperature == 0
    assert admit(SamplingParams(min_tokens=4), ends=())[1].ends_from == 0


def test_a_runner_reads_every_field_that_it_is_sent() -> None:
    run = Path(__file__).parents[2] / "millrace" / "run"
    text = "".join(file.read_text(encoding="utf-8") for file in run.rglob("*.py"))
    unread = [
        field.name for field in msgspec.structs.fields(DrawParams) if not re.search(rf"[.\"]{field.name}\b", text)
    ]
    assert unread == []


def test_a_runner_is_sent_no_text_of_a_grammar() -> None:
    grammar = Grammar("regex", "(a|b)" * 20_000)
    params = SamplingParams(
        max_tokens=9,
        temperature=0.5,
        seed=2**64 - 1,
        grammar=grammar,
        stop=("x",),
        thinking=ThinkingLimit(3, 1, 2, True),
    )
    sent = RowParams(params, (4,), "tenant")
    assert sent.params == DrawParams(temperature=0.5, seed=2**64 - 1)
    assert len(sent.to_bytes()) < 60
    assert RowParams.from_bytes(sent.to_bytes()) == sent
