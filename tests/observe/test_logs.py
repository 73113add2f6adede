"""Log lines: one line per event, level, process name."""

from __future__ import annotations

import io
import logging

from millrace.observe.logs import setup_logging


def test_level_process_and_one_line_per_event() -> None:
    out = io.StringIO()
    setup_logging("info", process="engine", stream=out)
    log = logging.getLogger("millrace.engine")
    log.debug("unseen")
    log.warning("a value\nwith a line break")
    lines = out.getvalue().splitlines()
    assert len(lines) == 1
    assert lines[0].endswith(" warning engine | a value\\nwith a line break")
    assert "\033" not in lines[0]


def test_second_set_up_replaces_the_first() -> None:
    first, second = io.StringIO(), io.StringIO()
    setup_logging("info", stream=first)
    setup_logging("debug", stream=second)
    logging.getLogger("millrace.x").debug("hello")
    assert first.getvalue() == ""
    assert second.getvalue().count("hello") == 1


def test_other_libraries_log_only_warnings_and_errors() -> None:
    out = io.StringIO()
    setup_logging("debug", stream=out)
    logging.getLogger("other.library").info("chatter")
    logging.getLogger("other.library").error("trouble")
    assert "chatter" not in out.getvalue()
    assert "trouble" in out.getvalue()


def test_traceback_follows_the_line() -> None:
    out = io.StringIO()
    setup_logging("info", stream=out)
    try:
        raise ValueError("no")
    except ValueError:
        logging.getLogger("millrace.x").exception("failed")
    assert out.getvalue().splitlines()[-1] == "ValueError: no"
