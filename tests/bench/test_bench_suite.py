"""The HTTP benchmark against a fake server: load, figures, fallbacks, time limit."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys

import pytest
from helpers.fake_openai import FakeServer, running
from helpers.ports import free_port
from helpers.served import wait_until

from millrace.bench.errors import BenchError
from millrace.bench.figures import Figure, percentile
from millrace.bench.http.cpu_share import Usage, parts_of, share_figures, usage_of
from millrace.bench.http.drive import Outcome, drive
from millrace.bench.http.prompts import IdPrompts, TextPrompts
from millrace.bench.http.suite import SuiteOptions, run_remote
from millrace.bench.http.target import Sample, Target
from millrace.bench.http.workload_figures import figures_of
from millrace.bench.http.workloads import RequestShape, Workload, mixed, shared_prefix, single, suite
from millrace.bench.local_server import cpu_seconds, descendants, resident_mib
from millrace.cli import main

pytestmark = pytest.mark.live


def tiny(requests: int = 6, concurrency: int = 3) -> Workload:
    return Workload("tiny", "for tests", tuple(RequestShape("tiny", i, 4, 8, 5) for i in range(requests)), concurrency)


def measure(
    server: FakeServer, *workloads: Workload, model: str = "", key: str = "", limit_s: float = 30.0
) -> list[Figure]:
    figures: list[Figure] = []
    options = SuiteOptions(workloads, seed=1, time_limit_s=limit_s)
    target = Target(server.url, model, key)
    asyncio.run(run_remote(target, options, figures.append, lambda *_: None))
    return figures


def values(figures: list[Figure]) -> dict[tuple[str, str], float]:
    return {(figure.workload, figure.metric): figure.value for figure in figures}


def test_workloads_have_the_documented_sizes() -> None:
    by_name = {workload.name: workload for workload in suite()}
    assert list(by_name) == [
        "single", "batch-1", "batch-4", "batch-16", "mixed", "shared-prefix", "prefix-cold", "prefix-warm",
    ]  # fmt: skip
    assert {(s.prompt_tokens, s.output_tokens) for s in single().shapes} == {(512, 128)}
    assert len(mixed().shapes) == 64
    assert mixed().concurrency == 16
    assert all(64 <= s.prompt_tokens <= 512 and 64 <= s.output_tokens <= 256 for s in mixed().shapes)
    assert {(s.shared_tokens, s.own_tokens, s.output_tokens) for s in shared_prefix().shapes} == {(1024, 32, 32)}
    assert shared_prefix().concurrency == 8
    assert mixed() == mixed()


@pytest.mark.parametrize("maker", [IdPrompts(7, tuple(range(50))), TextPrompts(7, 1.3)])
def test_prompts_follow_the_seed_and_share_prefixes(maker: IdPrompts | TextPrompts) -> None:
    first, second = maker.make(RequestShape("g", 0, 100, 20, 1)), maker.make(RequestShape("g", 1, 100, 20, 1))
    assert first == maker.make(RequestShape("g", 0, 100, 20, 1))
    assert first != second
    split = (lambda p: p) if isinstance(maker, IdPrompts) else str.split
    shared = 100 if isinstance(maker, IdPrompts) else round(100 / 1.3)
    assert split(first)[:shared] == split(second)[:shared]
    other = type(maker)(8, maker.pool if isinstance(maker, IdPrompts) else 1.3)
    assert other.make(RequestShape("g", 0, 100, 20, 1)) != first


def test_id_prompts_are_exact() -> None:
    assert len(IdPrompts(0, (5, 6, 7)).make(RequestShape("g", 3, 1024, 32, 1))) == 1056


def test_full_featured_server_gets_ids_and_ignore_eos() -> None:
    with running(FakeServer(token_delay_s=0.02)) as server:
        figures = values(measure(server, tiny()))
    sent = server.requests[-6:]
    assert all(len(body["prompt"]) == 12 and body["ignore_eos"] and body["max_tokens"] == 5 for body in sent)
    assert all(isinstance(token, int) for body in sent for token in body["prompt"])
    assert 1 < server.most_at_once <= 3
    assert figures["tiny", "TTFT p50"] >= 2
    assert figures["tiny", "TPOT p50"] > 0
    assert figures["tiny", "output"] > 0
    assert not any(workload == "server" for workload, _ in figures)


@pytest.mark.parametrize(
    ("server", "missing"),
    [
        (FakeServer(ignore_eos=False), {"ignore_eos"}),
        (FakeServer(usage=False), {"usage"}),
        (FakeServer(usage=False, ignore_eos=False), {"usage", "ignore_eos"}),
        (FakeServer(tokenize=False), {"token ids"}),
        (FakeServer(token_ids=False), {"token ids"}),
        (FakeServer(completions=False), {"completions", "token ids"}),
        (
            FakeServer(completions=False, usage=False, ignore_eos=False),
            {"completions", "token ids", "usage", "ignore_eos"},
        ),
    ],
)
def test_missing_server_features_are_reported_and_replaced(server: FakeServer, missing: set[str]) -> None:
    with running(server):
        figures = measure(server, tiny())
    assert {figure.metric for figure in figures if figure.workload == "server"} == missing
    assert values(figures)["tiny", "output"] > 0
    assert all(not figure.note for figure in figures if figure.workload == "tiny")


def test_answers_that_end_early_are_reported() -> None:
    with running(FakeServer(ignore_eos=False, stop_after=2)) as server:
        figures = measure(server, tiny())
    assert any("ended early: 2 tokens on average instead of 5" in figure.note for figure in figures)


def test_failures_are_counted_and_the_rest_measured() -> None:
    with running(FakeServer(fail_after=6)) as server:
        figures = measure(server, tiny(requests=8, concurrency=1))
    noted = [figure for figure in figures if "failed" in figure.note]
    assert len(noted) == 1
    assert "HTTP 500" in noted[0].note
    assert noted[0].requests > 0


def test_time_limit_ends_a_workload_and_reports_the_rest() -> None:
    with running(FakeServer(token_delay_s=0.1)) as server:
        figures = measure(server, tiny(requests=50, concurrency=1), limit_s=1.2)
    assert any("of 50 requests not completed within the time limit" in figure.note for figure in figures)


@pytest.mark.parametrize(
    ("server", "says"),
    [
        (FakeServer(models=("a", "b")), "lists 2 models .a, b.. Choose one with --model"),
        (FakeServer(models=()), "lists 0 models"),
        (FakeServer(key="secret"), "requires an API key"),
        (FakeServer(status=503), "HTTP 503"),
        (FakeServer(status=400), "refuses a plain streamed completion"),
        (FakeServer(completions=False, chat=False), "HTTP 404"),
    ],
)
def test_server_that_cannot_be_measured_is_refused_with_the_reason(server: FakeServer, says: str) -> None:
    with running(server), pytest.raises(BenchError, match=says):
        measure(server, tiny())


def test_key_and_model_are_passed_on() -> None:
    with running(FakeServer(models=("a", "b"), key="secret")) as server:
        measure(server, tiny(), model="b", key="secret")
    assert {body["model"] for body in server.requests} == {"b"}


def test_unreachable_server_is_one_sentence() -> None:
    with pytest.raises(BenchError, match="Is the server running"):
        measure(FakeServer(url=f"http://127.0.0.1:{free_port()}"), tiny())


@pytest.mark.parametrize("url", ["localhost:8000", "ftp://x", "", "http://"])
def test_invalid_url_is_refused(url: str) -> None:
    with pytest.raises(BenchError, match="not a server URL"):
        Target(url)


def test_v1_suffix_of_the_url_is_removed() -> None:
    assert Target("http://h:1/v1/").url == "http://h:1"


def test_figures_of_known_samples() -> None:
    samples = [
        Sample(0.0, 0.1, 0.5, 0.5, chunks=5, prompt_tokens=12, output_tokens=5, cached_tokens=6) for _ in range(6)
    ]
    figures = values(figures_of(Outcome(tiny(), samples, wall_s=2.0)))
    assert figures["tiny", "TTFT p50"] == pytest.approx(100)
    assert figures["tiny", "TPOT p50"] == pytest.approx(100)
    assert figures["tiny", "output"] == pytest.approx(15)
    assert figures["tiny", "prompt tokens cached"] == pytest.approx(50)


def test_percentile_interpolates() -> None:
    assert percentile([1.0, 2.0, 3.0, 4.0], 50) == pytest.approx(2.5)
    assert percentile([5.0], 99) == 5.0
    assert percentile([1.0, 3.0], 100) == 3.0


def test_drive_reuses_clients_until_the_work_is_done() -> None:
    async def go(server: FakeServer) -> Outcome:
        async with Target(server.url, "fake") as target:
            return await drive(target, tiny(10, 4), IdPrompts(0, (1, 2)), time_limit_s=20)

    with running(FakeServer(token_delay_s=0.02)) as server:
        outcome = asyncio.run(go(server))
    assert len(outcome.good) == 10
    assert outcome.incomplete == 0
    assert 1 < server.most_at_once <= 4


def test_command_prints_json_lines_and_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    with running(FakeServer()) as server:
        assert (
            main(["bench", "--url", server.url, "--workloads", "batch-4,batch-1", "--json", "--content-seed", "3"]) == 0
        )
        lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        assert {line["workload"] for line in lines} == {"batch-1", "batch-4"}
        assert all(line["target"] == server.url and isinstance(line["value"], float) for line in lines)
        assert main(["bench", "--url", server.url, "--workloads", "batch-1"]) == 0
        table = capsys.readouterr().out
    assert "TTFT p50" in table
    assert "batch-1" in table


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["bench", "nothing"], "Unknown benchmark 'nothing'"),
        (["bench", "--url", "http://127.0.0.1:1", "--workloads", "singel"], "Unknown workload 'singel'"),
        (["bench", "--time-limit", "0"], "greater than 0"),
        (["bench", "--time-limit", "nan"], "greater than 0"),
        (["bench", "--url", "nowhere"], "not a server URL"),
    ],
)
def test_command_refuses_invalid_options(arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) in (1, 2)
    assert says in capsys.readouterr().err


def test_memory_and_cpu_are_read_over_the_whole_process_tree() -> None:
    child_code = "x = list(range(2_000_000)); print('filled', flush=True); input()"
    code = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child_code!r}])"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"filled\n"
        [child] = descendants(process.pid)
        assert resident_mib(process.pid) > resident_mib(child) > 40
        wait_until(lambda: cpu_seconds(process.pid) > 0, "CPU time is counted")
        process.communicate(b"\n")


def test_cpu_use_is_split_by_role() -> None:
    used = {"engine": Usage(2.0, 1.0), "front": Usage(0.1, 0.0), "clients": Usage()}
    engine, front = share_figures("mixed", used, 1000, 4.0)
    assert (engine.metric, engine.value, engine.unit) == ("engine CPU", 2000.0, "µs/token")
    assert engine.note == "50.0% of a core; 33% of runnable time without a core"
    assert front.value == pytest.approx(100.0)


def test_cpu_use_of_a_busy_process_and_its_role() -> None:
    code = "while True: pass"
    with subprocess.Popen([sys.executable, "-c", code, "millrace.supervise.engine_child"]) as busy:
        try:
            assert parts_of(busy.pid)["engine"] == [busy.pid]
            before = usage_of([busy.pid])
            wait_until(lambda: (usage_of([busy.pid]) - before).ran_s > 0, "its CPU time grows")
        finally:
            busy.kill()
    assert next(iter(parts_of(os.getpid()))) == "server"
    assert usage_of([1 << 30]) == Usage()
