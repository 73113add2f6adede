"""The rules that the test run itself holds: see helpers/suite.py and tools/run_tests."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.suite import FUZZ, can_have
from hypothesis import given
from hypothesis import strategies as st

pytest_plugins = ["pytester"]
pytestmark = pytest.mark.live

CONFTEST = """
from helpers.suite import LiveGuard, Outcomes
from pathlib import Path

def pytest_configure(config):
    config.addinivalue_line("markers", "live: may start processes")
    config.pluginmanager.register(LiveGuard())
    config.pluginmanager.register(Outcomes(Path("outcomes")))
"""


@pytest.fixture
def run(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest):
    monkeypatch.setenv("PYTHONPATH", str(request.config.rootpath / "tests"))
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.delenv("PYTEST_ADDOPTS", raising=False)
    pytester.makeconftest(CONFTEST)

    def run(source: str, *options: str) -> tuple[pytest.RunResult, str]:
        pytester.makepyfile(source)
        return pytester.runpytest_subprocess(*options), (pytester.path / "outcomes").read_text()

    return run


def test_a_process_or_a_listening_socket_needs_the_marker(run) -> None:
    result, outcomes = run(
        """
        import pytest, socket, subprocess

        def test_process(): subprocess.run(["true"])
        def test_socket(): socket.create_server(("127.0.0.1", 0)).close()
        def test_compiler(): subprocess.run(["cc", "--version"], check=False)
        @pytest.mark.live
        def test_live(): subprocess.run(["true"])
        """
    )
    result.assert_outcomes(passed=2, failed=2)
    assert "This test started true. Mark it" in outcomes
    assert "This test bound a socket to ('127.0.0.1', 0)" in outcomes


def test_second_tries_delay_no_test_of_a_worker(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    """40 ms for each test: two minutes of a run on two cores."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    pytester.makeconftest(Path(__file__).with_name("conftest.py").read_text())
    pytester.makepyfile(
        """
        import socket

        def test_connection(pytestconfig):
            assert pytestconfig.failures_db.sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        """
    )
    plugins = ("-p", "pytest_rerunfailures", "-p", "xdist")
    result = pytester.runpytest_subprocess(*plugins, "--reruns", "1", "-n", "1", "-m", "", f"--rootdir={pytester.path}")
    result.assert_outcomes(passed=1)


def test_the_summary_has_counts_and_the_ends_of_logs(run) -> None:
    result, outcomes = run(
        """
        import pytest
        from pathlib import Path

        def test_wrong():
            print("last words")
            assert 1 == 2

        def test_second_try():
            if not Path("tried").exists():
                Path("tried").touch()
                raise AssertionError("the first failure")

        def test_right(): pass
        def test_skipped(): pytest.skip("no device")
        """,
        *("-p", "pytest_rerunfailures", "--reruns", "1"),
    )
    assert outcomes.splitlines()[0] == "2 1 1 1"
    assert "FAILED test_the_summary_has_counts_and_the_ends_of_logs.py::test_wrong" in outcomes
    assert "last words" in outcomes
    assert "RERUN test_the_summary_has_counts_and_the_ends_of_logs.py::test_second_try" in outcomes
    assert "the first failure" in outcomes
    result.stdout.fnmatch_lines(["*1 passed on the second try*"])


def test_files_without_selected_tests_are_not_imported() -> None:
    plain, file_of_live, one_live, alone = (
        "def test_it(): ...",
        "pytestmark = pytest.mark.live",
        "@pytest.mark.live\ndef test_it(): ...",
        "pytestmark = [pytest.mark.live, pytest.mark.alone]",
    )

    def chosen(marks: str) -> list[str]:
        return [source for source in (plain, file_of_live, one_live, alone) if can_have(source, marks)]

    assert chosen("") == chosen("not real_models") == [plain, file_of_live, one_live, alone]
    assert chosen("not live and not real_models") == [plain, one_live]
    assert chosen("live and not alone and not real_models") == [file_of_live, one_live, alone]
    assert chosen("alone and not real_models") == [alone]
    assert chosen("live or gpu") == [plain, file_of_live, one_live, alone], "what is no plain list is not judged"


@pytest.mark.skipif(FUZZ, reason="a fuzz run draws new cases")
def test_generated_cases_do_not_depend_on_what_a_process_has_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[int] = []

    @given(st.integers())
    def draw(value: int) -> None:
        drawn.append(value)

    draw()
    before = drawn.copy()
    drawn.clear()
    (tmp_path / "of_millrace.py").write_text(f"VALUES = {list(range(70_000, 70_100))}\n")
    monkeypatch.syspath_prepend(tmp_path)
    __import__("of_millrace")
    draw()
    assert drawn == before
