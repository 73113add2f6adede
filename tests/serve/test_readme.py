"""README's list of what is not there yet is true: each item names what asks for it, and that is refused."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from serve.front_under_test import MODEL, Front, running_front
from serve.wire import CHAT, request

from millrace.cli import COMMANDS, main
from millrace.terminal.foreign_names import ADVICE

README = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
SECTION = README.partition("## What is not there yet\n")[2].partition("\n## ")[0]
ITEMS = re.findall(r"^- (.*(?:\n  .*)*)", SECTION, re.MULTILINE)
ASKS = [(item, ask) for item in ITEMS for ask in re.findall(r"`([^`]+)`", item)]
SAYS = "not supported yet"


@pytest.fixture(scope="module")
def front() -> Iterator[Front]:
    with running_front() as running:
        yield running


def test_each_item_names_what_asks_for_it() -> None:
    assert ITEMS
    assert [item for item in ITEMS if "`" not in item] == []
    rest = SECTION.partition("- ")[0]
    assert rest.strip() == "What asks for these gets an error that says so:", "every item is in the list"


def test_each_option_that_is_refused_for_now_has_its_reason_in_the_list() -> None:
    """And what the product has learnt since is no longer refused as missing."""
    missing = {advice for advice in ADVICE.values() if SAYS in advice}
    assert missing == {ADVICE[ask] for _, ask in ASKS if ask.startswith("--")}


def test_the_table_of_commands_has_every_command_once() -> None:
    table = README.partition("## Commands\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (`millrace .*?) \|", table, re.MULTILINE)
    named = [name.removeprefix("millrace ").split()[0] for row in rows for name in re.findall(r"`([^`]+)`", row)]
    assert sorted(named) == sorted(COMMANDS)


def test_an_answer_comes_before_the_first_link() -> None:
    before = README.partition("](docs/")[0]
    assert "millrace run" in before
    assert "from openai import" in before
    assert before.count("\n") <= 80, "two screens"


@pytest.mark.live
@pytest.mark.parametrize(("item", "ask"), ASKS, ids=[ask for _, ask in ASKS])
def test_what_is_not_there_is_refused(front: Front, capsys: pytest.CaptureFixture[str], item: str, ask: str) -> None:
    if ask.startswith("--"):
        assert main(["serve", ask, "2"]) == 2, item
        assert SAYS in capsys.readouterr().err
        return
    if ask.startswith("POST "):
        reply = request(front.port, "POST", ask.removeprefix("POST "), {})
        assert reply.status == 501, item
    else:
        part = {"type": ask, ask: {"url": "data:image/png;base64,AAAA"}}
        body = {"model": MODEL, "messages": [{"role": "user", "content": [part]}]}
        reply = request(front.port, "POST", CHAT, body)
        assert reply.status == 400, item
    assert SAYS in reply.error["message"]
