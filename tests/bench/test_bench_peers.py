"""`bench peers`: parsing, selection, order of turns, verdicts, and engines that die."""

from __future__ import annotations

import asyncio
import io
import json
import os
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from helpers.fake_openai import FakeServer, running
from helpers.ports import free_port
from helpers.served import wait_until

from millrace.bench.errors import BenchError
from millrace.bench.figures import Figure
from millrace.bench.http.workloads import RequestShape, Workload, mixed, shared_prefix, single
from millrace.bench.local_server import ServerProcess
from millrace.bench.peers import compared_engine
from millrace.bench.peers.bars import BARS, Bar, ResultTable, bars_for, wanted_workloads
from millrace.bench.peers.compared_engine import ComparedEngine
from millrace.bench.peers.installed import PeerModels, find_installed, llama_command, vllm_command
from millrace.bench.peers.report import median_lines, print_tables, verdict_cells, verdict_line
from millrace.bench.peers.rounds import Comparison, Listener, RoundOptions, workloads_that_fit
from millrace.bench.peers.selection import EngineSelection, peers
from millrace.bench.peers.spec import PeerSpec, kind_of, parse_peer, parse_peer_args
from millrace.cli import main
from millrace.errors import ConfigError

TINY = Workload("tiny", "for tests", tuple(RequestShape("tiny", i, 0, 8, 3) for i in range(2)), 2)
SMOL = BARS["smollm2-135m"]
DYING_SERVER = Path(__file__).parents[1] / "helpers" / "dying_server.py"

pytestmark = pytest.mark.live


@pytest.fixture(autouse=True)
def _short_watch(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine's use of the CPU while idle is read, but no test compares it."""
    monkeypatch.setattr(compared_engine, "IDLE_WATCH_S", 0.05)


# ── naming ────────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_peer_is_given_by_url_and_pid() -> None:
    assert parse_peer("vllm=http://h:1/") == PeerSpec("vllm", "http://h:1")
    assert parse_peer("a.b-c=https://h/v1,pid=42") == PeerSpec("a.b-c", "https://h/v1", 42)


@pytest.mark.parametrize(
    "text", ["", "vllm", "=http://h", "a b=http://h", "v=h:1", "v=ftp://h", "v=http://h,pid=x", "v=http://h,port=1"]
)
def test_malformed_peer_is_refused_with_the_expected_form(text: str) -> None:
    with pytest.raises(ConfigError, match="NAME=URL"):
        parse_peer(text)


def test_arguments_of_a_peer_are_split_like_a_shell_does() -> None:
    assert parse_peer_args('llama.cpp=-fa on --name "a b"') == ("llama.cpp", ["-fa", "on", "--name", "a b"])
    for wrong in ("unknown=-x", "vllm", 'vllm="'):
        with pytest.raises(ConfigError, match="--peer-args"):
            parse_peer_args(wrong)


def test_kinds_follow_from_names() -> None:
    names = ("vLLM-eager", "openvino_fp16", "llama.cpp", "millrace", "tgi")
    assert [kind_of(name) for name in names] == ["vllm", "openvino", "llama.cpp", "millrace", ""]


# ── selecting engines ─────────────────────────────────────────────────────────────────────────────────────────────────
def selection(**changes: Any) -> EngineSelection:
    return EngineSelection(**{"bars": SMOL, "workloads": (single(), shared_prefix(), mixed()), **changes})


def test_each_peer_gets_the_workloads_its_bars_need() -> None:
    assert selection().workloads_of("llama.cpp") == ("single",)
    assert selection().workloads_of("my-vllm") == ("single", "mixed", "shared-prefix")
    assert (
        selection().workloads_of("tgi") == selection().workloads_of("millrace") == ("single", "mixed", "shared-prefix")
    )
    assert selection(everything=True).workloads_of("llama.cpp") == ("single", "shared-prefix", "mixed")
    assert selection().one_at_a_time("llama.cpp")
    assert not selection(everything=True).one_at_a_time("llama.cpp")
    assert wanted_workloads(BARS["qwen2.5-coder-1.5b"], "vllm") == ()


def test_only_wanted_peers_without_a_url_are_looked_for() -> None:
    assert [
        k for k in ("llama.cpp", "vllm", "openvino") if selection(given=[PeerSpec("vllm", "http://h")]).is_wanted(k)
    ] == [
        "llama.cpp",
        "openvino",
    ]
    assert [
        k for k in ("llama.cpp", "vllm", "openvino") if selection(bars=BARS["qwen2.5-coder-1.5b"]).is_wanted(k)
    ] == ["llama.cpp"]
    assert not selection(only=["vllm"]).is_wanted("openvino")
    chosen = peers(selection(given=[PeerSpec("a", "http://h"), PeerSpec("b", "http://h")], only=["b"]), print)
    assert [peer.name for peer in chosen] == ["b"]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"only": ["sglang"]}, "--only has unknown peer 'sglang'. Peers: llama.cpp, vllm, openvino"),
        ({"given": [PeerSpec("a", "http://h"), PeerSpec("a", "http://i")]}, "each name must be unique"),
        ({"given": [PeerSpec("millrace", "http://h")]}, "use --url for Millrace"),
    ],
)
def test_invalid_selection_is_refused(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        peers(selection(**changes), print)


def fake_python(folder: Path, **answer: Any) -> str:
    """A fake interpreter that reports these packages."""
    script = folder / "python"
    script.write_text(f"#!/bin/sh\necho '{json.dumps(answer)}'\n")
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    return str(script)


def test_installed_peers_are_found_and_missing_ones_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    python = fake_python(tmp_path, vllm=True, openvino_genai=True, llama_server="")
    (tmp_path / "llama-server").write_text("#!/bin/sh\n")
    (tmp_path / "llama-server").chmod(0o755)
    found = find_installed(
        [python], PeerModels(gguf="m.gguf", openvino="m.gguf"), threads=2, one_at_a_time=["llama.cpp"]
    )
    assert [launch.name for launch in found.commands] == ["llama.cpp", "openvino"]
    llama = " ".join(found.commands[0].with_port(77))
    assert llama.startswith(str(tmp_path / "llama-server"))
    assert "-t 2 -c 2048 -np 1" in llama
    assert "--port 77" in llama
    assert found.commands[1].with_port(77)[0] == python
    assert len(found.missing) == 1
    assert found.missing[0].startswith("vllm is skipped: it needs the model as safetensors: --bf16-model")
    nothing = find_installed([], PeerModels("m.gguf", "dir", "m.gguf"))
    assert [sentence.split(" ")[0] for sentence in nothing.missing] == ["llama.cpp", "vllm", "openvino"]


def test_missing_interpreter_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such interpreter"):
        find_installed([str(tmp_path / "none")], PeerModels())


def test_launch_commands_set_cores_and_slots() -> None:
    vllm = " ".join(vllm_command("/x/python", "dir", 1, 16).with_port(5))
    assert vllm.startswith("env VLLM_CPU_OMP_THREADS_BIND=")
    assert "--max-num-seqs 16 " in vllm
    assert "-np 16" in " ".join(llama_command("llama-server", "m.gguf", 2, 16).command)


# ── judging ───────────────────────────────────────────────────────────────────────────────────────────────────────────
def results(**figures: dict[tuple[str, str], list[float]]) -> ResultTable:
    made = ResultTable()
    for engine, values in figures.items():
        for key, several in values.items():
            for value in several:
                made.add(engine.replace("llama", "llama.cpp"), key, value, "tok/s")
    return made


def test_medians_are_compared_with_the_best_peer_of_the_bar() -> None:
    key = ("mixed", "output")
    full = results(
        millrace={key: [300, 500, 460]}, vllm={key: [250, 220, 230]}, openvino={key: [240]}, llama={key: [999]}
    )
    verdict = full.judge(Bar(*key, "tok/s", 1.8, 3.0, ("vllm", "openvino"), more_is_better=True))
    assert (verdict.ours, verdict.theirs, verdict.against, verdict.absent) == (460, 240, "openvino", ())
    assert verdict.ratio == pytest.approx(460 / 240)
    assert (verdict.met, verdict.goal_met) == (True, False)
    cells = verdict_cells(verdict)
    assert cells[2:] == ["460.0 tok/s", "240.0 openvino", "1.92×", "≥ 1.8×", "≥ 3×", "✓", ""]


def test_lower_times_are_better_and_absolute_bars_need_no_peer() -> None:
    key, start = ("single", "TTFT p50"), ("server", "start to first token")
    small = results(millrace={key: [100.0], start: [5.0]}, vllm={key: [150.0]})
    verdict = small.judge(Bar(*key, "ms", 0.6, 0.4, ("vllm", "openvino")))
    assert (verdict.met, verdict.absent) == (False, ("openvino",))
    assert verdict_cells(verdict)[-2:] == ["✗", "without openvino"]
    late = small.judge(Bar(*start, "s", 4.0, 2.0))
    assert (late.met, verdict_cells(late)[2], verdict_cells(late)[5]) == (False, "5 s", "≤ 4 s")
    assert json.loads(verdict_line(late))["met"] is False


def test_unmeasured_figures_are_neither_met_nor_missed() -> None:
    empty = results(millrace={("mixed", "output"): [float("nan")]})
    for bar in SMOL:
        assert empty.judge(bar).met is None
        assert verdict_cells(empty.judge(bar))[7] == "?"


def test_bars_follow_from_the_model() -> None:
    assert bars_for("smollm2-135m-instruct") == "smollm2-135m"
    assert bars_for("/models/qwen2.5-coder-1.5b.gguf") == "qwen2.5-coder-1.5b"
    assert bars_for("llama-3.1-8b") == ""


def test_tables_contain_every_engine_and_bar() -> None:
    made = results(millrace={("single", "decode"): [100, 120]}, llama={("single", "decode"): [50]})
    out = io.StringIO()
    print_tables(made, [made.judge(bar) for bar in SMOL], ["a note with [brackets]"], out)
    text = out.getvalue()
    assert "110.0 (100.0–120.0)" in text
    assert "2.20×" in text
    assert "a note with [brackets]" in text
    assert len(list(median_lines(made))) == 2


# ── turns ─────────────────────────────────────────────────────────────────────────────────────────────────────────────
class Recorder:
    def __init__(self) -> None:
        self.figures: list[tuple[str, int, Figure]] = []
        self.problems: list[tuple[str, str]] = []

    def listener(self) -> Listener:
        return Listener(
            figure=lambda *all: self.figures.append(all),
            progress=lambda *_: None,
            problem=lambda *all: self.problems.append(all),
        )


def options(rounds: int = 2, **changes: Any) -> RoundOptions:
    values: dict[str, Any] = {"workloads": (TINY,), "seed": 1, "time_limit_s": 20.0, "budget_s": 60.0}
    return RoundOptions(**{**values, "rounds": rounds, "perplexity": False, **changes})


def test_engines_alternate_and_get_the_same_prompts() -> None:
    recorder = Recorder()
    with running(FakeServer()) as a, running(FakeServer()) as b, running(FakeServer()) as c:
        three = [ComparedEngine(name, url=server.url) for name, server in (("a", a), ("b", b), ("c", c))]
        comparison = Comparison(three, options(), recorder.listener())
        asyncio.run(comparison.run())
        sent = [sorted(x["prompt"] for x in server.requests if x["max_tokens"] == 3) for server in (a, b, c)]
    assert comparison.order == [(1, "a"), (1, "b"), (1, "c"), (2, "a"), (2, "b"), (2, "c")]
    assert sent[0] == sent[1] == sent[2]
    assert len({tuple(prompt) for prompt in sent[0]}) == 4  # two new requests in each round
    rounds = [(name, number) for name, number, figure in recorder.figures if figure.metric == "output"]
    assert rounds == [("a", 1), ("b", 1), ("c", 1), ("a", 2), ("b", 2), ("c", 2)]
    assert not recorder.problems


def test_unreachable_peer_is_reported_and_the_others_continue() -> None:
    recorder = Recorder()
    with running(FakeServer()) as server:
        two = [ComparedEngine("gone", url=f"http://127.0.0.1:{free_port()}"), ComparedEngine("here", url=server.url)]
        comparison = Comparison(two, options(), recorder.listener())
        asyncio.run(comparison.run())
    assert comparison.order == [(1, "here"), (2, "here")]
    [(name, sentence)] = recorder.problems
    assert name == "gone"
    assert "is not reachable" in sentence
    assert "dropped:" in sentence


def fake_process(port: int, *, answers: int = 1000) -> ServerProcess:
    """A server process that exits during a request of 3 tokens after a number of requests."""
    command = [sys.executable, str(DYING_SERVER), str(port), str(answers)]
    return ServerProcess(command, port, ready_path="/health", start_timeout_s=60.0)


def state_of(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


@pytest.mark.parametrize("between", ["pause", "keep", "stop"])
def test_engine_started_here_uses_no_cpu_between_its_turns(between: Any) -> None:
    async def live() -> None:
        engine = ComparedEngine("own", make=lambda: fake_process(free_port()), between=between)
        figures = await engine.open()
        names = [figure.metric for figure in figures]
        assert names == ["start to ready", "start to first token", "memory at rest", "CPU at idle"]
        assert engine.is_stopped == (between != "keep")
        if between == "pause":
            wait_until(lambda: state_of(engine.pid) == "T", "stopped")
        await engine.begin_turn()
        pid = engine.pid
        async with engine.target() as target:
            await target.find_model()
            assert not (await target.complete("Hello", 2)).error
        await engine.end_turn()
        await engine.close()
        assert not Path(f"/proc/{pid}").exists()

    asyncio.run(live())


def test_process_that_exits_is_reported() -> None:
    recorder = Recorder()
    dying = ComparedEngine("brief", make=lambda: fake_process(free_port(), answers=2), between="keep")
    with running(FakeServer()) as server:
        comparison = Comparison([dying, ComparedEngine("here", url=server.url)], options(3), recorder.listener())
        asyncio.run(comparison.run())
    rounds = {name: [turn for turn, who in comparison.order if who == name] for name in ("brief", "here")}
    assert rounds["here"] == [1, 2, 3]
    assert rounds["brief"] in ([1, 2], [1, 2, 3])  # it may still be running when its third turn begins
    said = [sentence for name, sentence in recorder.problems if name == "brief"]
    assert any("brief has exited:" in sentence and "worn out" in sentence for sentence in said)


def test_process_that_cannot_start_raises_with_the_reason(tmp_path: Path) -> None:
    async def live() -> None:
        await ComparedEngine("x", make=lambda: ServerProcess([str(tmp_path / "none")], 1)).open()

    with pytest.raises(BenchError, match="Cannot start .*none: No such file"):
        asyncio.run(live())


def test_busy_idle_engine_is_reported() -> None:
    recorder = Recorder()
    burner = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        with running(FakeServer(token_delay_s=0.1)) as a, running(FakeServer()) as b:
            two = [ComparedEngine("quiet", url=a.url), ComparedEngine("busy", url=b.url, pid=burner.pid)]
            asyncio.run(Comparison(two, options(1), recorder.listener()).run())
    finally:
        burner.kill()
        burner.wait()
    assert any(name == "busy" and "of a core while quiet was measured" in said for name, said in recorder.problems)


def test_unrelated_processes_that_use_the_cores_are_reported() -> None:
    recorder = Recorder()
    burner = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    quiet = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        with running(FakeServer(token_delay_s=0.1)) as server:
            one = [ComparedEngine("own", url=server.url, pid=quiet.pid)]
            asyncio.run(Comparison(one, options(1), recorder.listener()).run())
    finally:
        for process in (burner, quiet):
            process.kill()
            process.wait()
    assert any("is unreliable" in said for _, said in recorder.problems)
    assert [figure.value > 15 for _, _, figure in recorder.figures if figure.workload == "machine"] == [True]


def test_round_takes_the_workloads_that_fit_the_remaining_time() -> None:
    works = (single(), shared_prefix(), mixed())
    assert workloads_that_fit(works, {}, 0.0) == list(works)
    costs = {"single": 10.0, "shared-prefix": 50.0, "mixed": 100.0}
    assert [work.name for work in workloads_that_fit(works, costs, 160.0)] == ["single", "shared-prefix", "mixed"]
    assert [work.name for work in workloads_that_fit(works, costs, 115.0)] == ["single", "shared-prefix"]
    assert [work.name for work in workloads_that_fit(works, costs, 5.0)] == []


# ── the command ───────────────────────────────────────────────────────────────────────────────────────────────────────
def test_command_prints_json_lines_and_verdicts(capsys: pytest.CaptureFixture[str]) -> None:
    with running(FakeServer()) as own, running(FakeServer()) as other:
        code = main(
            [
                *("bench", "peers", "--url", own.url, "--peer", f"vllm={other.url},pid={os.getpid()}"),
                *("--only", "vllm", "--quick", "--workloads", "shared-prefix", "--json", "--bars", "smollm2-135m"),
            ]
        )
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    verdicts = {(x["workload"], x["metric"]): x for x in lines if x["kind"] == "verdict"}
    assert verdicts["shared-prefix", "output"]["met"] in (True, False)
    assert "met" not in verdicts["mixed", "output"]
    assert code == 1  # not every bar could be judged
    assert {x["engine"] for x in lines if x["kind"] == "median"} == {"millrace", "vllm"}


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["peers", "--peer", "x"], "NAME=URL"),
        (["peers", "--rounds", "101"], "--rounds is 101"),
        (["peers", "--rounds", "0"], "--rounds is 0"),
        (["peers", "--minutes", "0"], "--minutes is 0"),
        (["plan", "--everything"], "--everything is an option of `millrace bench peers`"),
        (["--rounds", "0"], "--rounds is an option of `millrace bench peers`"),
        (["peers", "--between", "sleep"], "pause, keep or stop"),
        (["peers", "--bars", "mine"], "Unknown bars 'mine'"),
        (["peers", "--workloads", "batch-1"], "Unknown workload 'batch-1'"),
        (["peers", "--url", "http://h", "--bf16-model", "/nowhere"], "--bf16-model /nowhere: no such file"),
        (["peers", "--cases", "decode"], "--cases is an option of `millrace bench gpu`"),
        (["--peer", "v=http://h"], "--peer is an option of `millrace bench peers`"),
        (["gpu", "--rounds", "3"], "--rounds is an option of `millrace bench peers`"),
    ],
)
def test_invalid_options_are_refused(arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", *arguments]) == 2
    assert says in capsys.readouterr().err


def test_terminated_benchmark_leaves_no_server_behind(tmp_path: Path) -> None:
    """The peer never becomes ready; it is stopped together with the benchmark."""
    (tmp_path / "llama-server").write_text(f"#!/bin/sh\necho $$ > {tmp_path}/pid\nexec sleep 100\n")
    (tmp_path / "llama-server").chmod(0o755)
    (tmp_path / "m.gguf").write_bytes(b"")
    with running(FakeServer()) as own:
        command = [sys.executable, "-m", "millrace", "bench", "peers", "--url", own.url, "--only", "llama.cpp"]
        bench = subprocess.Popen(
            [*command, "--gguf", str(tmp_path / "m.gguf"), "--bars", "none"],
            env={**os.environ, "PATH": f"{tmp_path}:/usr/bin:/bin"},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            wait_until(lambda: (tmp_path / "pid").is_file() and (tmp_path / "pid").read_text() != "", "peer started")
            bench.terminate()
            assert bench.wait(60) == 143
        finally:
            bench.kill()
    assert not Path(f"/proc/{(tmp_path / 'pid').read_text().strip()}").exists()
