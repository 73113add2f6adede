"""The planner of encoders beyond what every planner holds: which texts share a step."""

from __future__ import annotations

import numpy as np

from millrace.params.rows import RowParams
from millrace.params.sampling import SamplingParams
from millrace.plan.encoding.planner import EncodePlanner, EncodeSettings
from millrace.plan.request import BATCH, INTERACTIVE, STANDARD, Request

PARAMS = RowParams(SamplingParams(max_tokens=0, pooling="mean"))


def planner(max_rows: int = 8, token_budget: int = 20, max_tokens: int = 100) -> EncodePlanner:
    return EncodePlanner(EncodeSettings(max_rows=max_rows, token_budget=token_budget, max_tokens=max_tokens))


def text(request_id: int, length: int, *, priority: int = STANDARD, tenant: str = "", arrival: float = 0.0) -> Request:
    prompt = np.zeros(length, np.int32)
    return Request(
        request_id, prompt, max_tokens=0, priority=priority, tenant=tenant, arrival=arrival, row_params=PARAMS
    )


def steps(made: EncodePlanner) -> list[list[int]]:
    """Ids of the texts of each step, until nothing is left."""
    found = []
    while (plan := made.plan(1.0)) is not None:
        found.append([admission.request_id for admission in plan.admitted])
        made.confirm(plan.step_no, np.zeros(0, np.int32))
    return found


def test_a_step_holds_whole_texts_up_to_its_budget() -> None:
    made = planner(token_budget=20)
    for request_id, length in enumerate([8, 8, 8, 30, 4, 16]):
        made.submit(text(request_id, length))
    assert steps(made) == [[0, 1], [2], [3], [4, 5]], "a text longer than the budget runs alone"


def test_a_step_has_at_most_as_many_texts_as_there_are_rows() -> None:
    made = planner(max_rows=2)
    for request_id in range(3):
        made.submit(text(request_id, 1))
    assert steps(made) == [[0, 1], [2]]


def test_urgent_texts_go_first_and_tenants_take_turns() -> None:
    made = planner(token_budget=10)
    for request_id in range(4):
        made.submit(text(request_id, 10, priority=BATCH, tenant="many"))
    made.submit(text(4, 10, priority=BATCH, tenant="one"))
    made.submit(text(5, 10, priority=INTERACTIVE, tenant="many"))
    order = [ids[0] for ids in steps(made)]
    assert order[0] == 5
    assert order.index(4) == 1, "the tenant that has had nothing goes before the one that has"


def test_a_text_that_is_too_long_ends_with_the_limit_in_its_message() -> None:
    made = planner(max_tokens=100)
    made.submit(text(0, 100))
    made.submit(text(1, 101))
    assert made.plan(0.0) is not None
    (ended,) = made.take_ended()
    assert (ended.request_id, ended.reason) == (1, "error")
    assert "101" in ended.message
    assert "100" in ended.message


def test_a_request_for_text_ends_with_an_error() -> None:
    made = planner()
    made.submit(Request(0, np.zeros(3, np.int32), max_tokens=5))
    assert made.plan(0.0) is None
    (ended,) = made.take_ended()
    assert (ended.reason, ended.message) == ("error", "This model reads texts and writes none.")


def test_a_text_says_what_it_waited_for() -> None:
    made = planner(token_budget=10)
    first, second = text(0, 10), text(1, 10)
    made.submit(first)
    made.submit(second)
    made.plan(1.0)
    made.plan(3.0)
    assert second.diagnostics.waited_for == {"budget": 2.0}
    assert second.diagnostics.num_ahead == 1
