"""What a front tells each new engine of, and which adapters requests may name meanwhile."""

from __future__ import annotations

import logging

import msgspec
import pytest

from millrace.link.adapter_messages import AdapterAnswer, AddAdapter
from millrace.link.front.known_adapters import KnownAdapters

ONE, TWO, OWN = AddAdapter("one", "/a/one"), AddAdapter("two", "/a/two"), AddAdapter("own", "/a/own")


def answer(error: str = "") -> bytes:
    return msgspec.json.encode(AdapterAnswer(error=error))


def test_every_engine_is_told_of_all_that_was_added(caplog: pytest.LogCaptureFixture) -> None:
    known = KnownAdapters()
    known.lasting = lambda: [OWN]
    known.on_new_engine(("given",))
    known.on_names(("given", "one", "two"))
    for asked in (ONE, TWO):
        known.note_added(asked)
    for _ in range(2):  # A second restart, too.
        assert known.on_new_engine(("given",)) == [OWN, ONE, TWO]
        for query, asked in enumerate((OWN, ONE, TWO)):
            known.note_told(query, asked.name)
        assert known.names == ("given", "one", "own", "two")
        known.on_names(("given", "one"))
        known.on_reply(1, answer())
        assert known.names == ("given", "one", "own", "two")
    known.on_reply(0, answer("There is no such directory."))
    assert "own" not in (known.names or ())
    assert "no such directory" in caplog.text
    known.on_names(("given", "one", "two"))
    known.on_names(("given", "two"))
    assert known.on_new_engine(()) == [OWN, TWO], "what was removed is forgotten"


def test_a_model_that_takes_no_adapters_is_told_of_none(caplog: pytest.LogCaptureFixture) -> None:
    known = KnownAdapters()
    known.lasting = lambda: [OWN]
    with caplog.at_level(logging.WARNING):
        assert known.on_new_engine(None) == []
    assert known.names is None
    assert "--allow-adapters" in caplog.text
