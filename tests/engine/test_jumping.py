"""When steps of many rows wait for the tokens that grammars force."""

from __future__ import annotations

from millrace.engine.jumping import FIRST_REST, LOOK_EVERY, TRIED_STEPS, Jumping


def until_look(jumping: Jumping) -> int:
    steps = 1
    while not jumping.looks():
        steps += 1
    return steps


def attempt(jumping: Jumping, num_saved: int) -> None:
    for _ in range(TRIED_STEPS):
        assert jumping.waits(64)
        jumping.saw_step(num_saved, 64)


def test_few_rows_always_wait() -> None:
    jumping = Jumping(16)
    assert jumping.waits(16)
    jumping.saw_step(0, 16)
    assert jumping.waits(16)
    assert not jumping.waits(17)
    assert Jumping().waits(100_000)


def test_many_rows_wait_while_many_tokens_are_forced() -> None:
    jumping = Jumping(16)
    assert until_look(jumping) == LOOK_EVERY
    jumping.saw_forced(10, 64)
    assert not jumping.waits(64), "too few"
    assert until_look(jumping) == LOOK_EVERY
    jumping.saw_forced(32, 64)
    attempt(jumping, 40)
    attempt(jumping, 40)
    attempt(jumping, 5)
    assert not jumping.waits(64), "it no longer pays"


def test_after_attempts_that_do_not_pay_it_rests_longer_and_longer() -> None:
    jumping, rests = Jumping(16), []
    for _ in range(7):
        rests.append(until_look(jumping) - LOOK_EVERY)
        jumping.saw_forced(64, 64)
        attempt(jumping, 0)
    assert rests == [0, *(FIRST_REST << number for number in range(5)), 1024]
    until_look(jumping)
    jumping.saw_forced(64, 64)
    attempt(jumping, 64)
    attempt(jumping, 0)
    assert until_look(jumping) == FIRST_REST + LOOK_EVERY
