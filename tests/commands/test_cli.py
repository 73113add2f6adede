"""The command line: fast help, settings as options, one-sentence errors, tracebacks only with --debug."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from helpers.fake_openai import FakeServer, running

from millrace.cli import COMMANDS, command_parser, main, top_help
from millrace.config import Config, all_settings, load_config
from millrace.errors import NotFound
from millrace.terminal.foreign_names import translated
from millrace.terminal.running_servers import announced, choose_server, read_settings, running_servers


def millrace(*arguments: str, **more: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "millrace", *arguments], capture_output=True, text=True, timeout=60, check=False, **more
    )


@pytest.mark.live
@pytest.mark.parametrize("arguments", [["--help"], ["config"], ["--version"], ["serve", "--help"], ["nonsense"]])
def test_light_commands_import_nothing_heavy(arguments: list[str]) -> None:
    """`config` checks sampling defaults, which are a msgspec struct."""
    heavy = {"torch", "aiohttp", "rich", "numpy", "tokenizers", *(() if arguments == ["config"] else ("msgspec",))}
    code = (
        "import sys; from millrace.cli import main\n"
        f"try: main({arguments!r})\nexcept SystemExit: pass\n"
        f"heavy = sorted({heavy!r} & set(sys.modules))\n"
        "sys.exit(f'imported {heavy}' if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


def test_help_has_examples() -> None:
    text = top_help()
    assert all(f"  {name} " in text for name in COMMANDS)
    assert "examples:" in text
    assert "millrace serve" in text


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_every_command_has_help_with_examples(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([name, "--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    assert text.startswith(f"usage: millrace {name}")
    assert "examples:" in text


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_help_fits_80_columns(name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Also by `help COMMAND`. Either all meanings of a list of examples stand beside them, or all below."""
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit):
        main(["help", name])
    text = capsys.readouterr().out
    assert text.startswith(f"usage: millrace {name}")
    assert [line for line in text.splitlines() if len(line) > 80] == []
    examples = text.partition("examples:\n")[2].partition("\n\n")[0].splitlines()
    beside = [line for line in examples if re.match(r"  \S.*\s{2,}\S", line)]
    below = [line for line in examples if re.match(r" {6}\S", line) and not line.startswith(" " * 7)]
    assert not beside or not below, examples


def test_help_of_an_unknown_command_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["help", "sreve"]) == 2
    assert "Did you mean 'serve'?" in capsys.readouterr().err


def test_help_of_serve_begins_with_ten_settings(capsys: pytest.CaptureFixture[str]) -> None:
    def groups(option: str) -> dict[str, list[str]]:
        with pytest.raises(SystemExit):
            main(["serve", option])
        parts = re.split(r"\n\n(?=\w)", capsys.readouterr().out)
        found = {part.partition(":\n")[0]: re.findall(r"^  (--[\w-]+)", part, re.MULTILINE) for part in parts}
        return {name: options for name, options in found.items() if options}

    common = groups("--help")
    assert list(common) == ["options", "common settings"]
    assert len(common["common settings"]) == 10
    assert common["common settings"][:2] == ["--port", "--host"]
    every = groups("--help-all")
    assert list(every)[:2] == list(common)
    assert every["common settings"] == common["common settings"]
    assert "--prefix-cache" in every["scheduler"]
    assert sum(map(len, every.values())) >= len(all_settings())


@pytest.mark.parametrize("name", ["chat", "generate"])
def test_help_hides_scheduler_settings_and_help_all_shows_them(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    texts = {}
    for flag in ("--help", "--help-all"):
        with pytest.raises(SystemExit):
            main([name, flag])
        texts[flag] = capsys.readouterr().out
    assert "--device" in texts["--help"]
    assert "--aging-s" not in texts["--help"]
    assert "--aging-s" in texts["--help-all"]


@pytest.mark.parametrize("key", sorted(all_settings()))
def test_every_setting_is_an_option_by_short_and_dotted_name(key: str, capsys: pytest.CaptureFixture[str]) -> None:
    setting = all_settings()[key]
    value = {bool: None, int: "7", float: "0.5", str: "abc"}.get(setting.kind, str(setting.default))
    if setting.minimum is not None and value is not None:
        value = str(max(setting.kind(value), setting.kind(setting.minimum)))
    value = {"plan.token_budget": "300", "plan.mixed_budget": "300"}.get(key, value)
    host = ["--kv-host-gib", "1"]
    with_others = {
        "memory.kv_disk": [*host, "--kv-disk-gib", "1"],
        "memory.kv_disk_gib": [*host, "--kv-disk", "kv"],
        "memory.kv_disk_key": [*host, "--kv-disk", "kv", "--kv-disk-gib", "1"],
    }
    for flag in (setting.flag, f"--{key}"):
        arguments = ["config", "--toml", *with_others.get(key, []), flag] + ([value] if value is not None else [])
        assert main(arguments) == 0
        printed = tomllib.loads(capsys.readouterr().out)[setting.section][setting.name]
        assert printed == (True if setting.kind is bool else value if isinstance(printed, str) else setting.kind(value))


def test_booleans_can_be_switched_off(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "--toml", "--no-prefix-cache"]) == 0
    assert tomllib.loads(capsys.readouterr().out)["plan"]["prefix_cache"] is False


def test_config_shows_each_value_with_its_source(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "my.toml"
    file.write_text('[model]\ndtype = "float32"\n')
    assert main(["config", "some-model", "--config", str(file), "--port", "9000"]) == 0
    lines = {line.split()[0]: line for line in capsys.readouterr().out.splitlines() if line.strip()}
    assert set(all_settings()) < set(lines)
    assert lines["model.source"].split()[1:4] == ['"some-model"', "command", "line"]
    assert lines["model.dtype"].split()[1:3] == ['"float32"', str(file)]
    assert lines["server.port"].split()[1:4] == ["9000", "command", "line"]
    assert lines["server.host"].split()[1:3] == ['"127.0.0.1"', "default"]
    assert "address to listen on" in lines["server.host"]


def test_config_as_toml_is_a_file_that_config_accepts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", 'odd "name" \\ ü', "--toml", "--port", "9000", "--kv-gib", "1.5"]) == 0
    file = tmp_path / "my.toml"
    file.write_text(capsys.readouterr().out, encoding="utf-8")
    config = load_config(file).config
    assert (config.model.source, config.server.port, config.memory.kv_gib) == ('odd "name" \\ ü', 9000, 1.5)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["serv"], "Unknown command 'serv'. Did you mean 'serve'?"),
        (["help", "nosuch"], "Unknown command 'nosuch'. Commands: run, serve"),
        (["config", "--prot", "1"], "Unknown option '--prot'. Did you mean '--port'?"),
        (["config", "--server.prot", "1"], "Did you mean '--server.port'?"),
        (["config", "--max_running", "1"], "Did you mean '--max-running'?"),
        (["config", "--Port=1"], "Unknown option '--Port'. Did you mean '--port'?"),
        (["serve", "--zzzzqqq"], "`millrace serve --help-all` lists the options."),
        (["serve", "--host-port"], "Unknown option '--host-port'. `millrace serve --help-all` lists the options."),
        (["run", "smollm2", "--lora", "file"], "adapters as GGUF files are not supported."),
        (["serve", "-ngl", "99"], "A model runs wholly on one device"),
        (["config", "--port"], "--port needs a value."),
        (["config", "--port", "abc"], "server.port is 'abc'; it must be a whole number from 0 to 65535."),
        (["config", "--port", "99999"], "from 0 to 65535"),
        (["config", "--dtype", "int3"], "must be one of auto, float32, bfloat16, float16"),
        (["config", "--in-process=yes"], "--in-process takes no value."),
        (["config", "a", "b"], "Unexpected argument 'b'. See `millrace config --help`."),
        (["generate", "The", "sea"], "Unexpected argument 'sea'. Quote the prompt."),
        (["load", "http://a:1"], "Unexpected argument 'http://a:1'. Did you mean '--url http://a:1'?"),
        (["keys"], "Missing arguments: WHAT, FILE."),
        (["config", "a", "--source", "b"], "The model is given twice"),
        (["config", "--config", "/no/such/file.toml"], "There is no settings file /no/such/file.toml."),
        (["config", "--token-budget", "3", "--max-running", "9"], "below plan.max_running"),
        (["--port", "1", "config"], "Options come after the command: millrace COMMAND --port"),
        (["generate"], "Missing argument: PROMPT."),
        (["generate", "x", "--raw", "--chat"], "not allowed with"),
        (["generate", ""], "The prompt is empty"),
        (["generate", "x", "--system", "y"], "--system needs --chat"),
    ],
)
def test_misuse_is_one_sentence_and_exit_code_2(
    arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert says in captured.err
    assert captured.err.startswith("millrace: ")
    assert captured.err.count("\n") == 1
    assert captured.out == ""


OTHER_ENGINES = {
    "vllm": (
        "--enable-lora --max-cpu-loras --lora-dtype --limit-mm-per-prompt --task"
        " --pipeline-parallel-size --speculative-config --guided-decoding-backend --swap-space --trust-remote-code"
        " --enable-chunked-prefill --disable-log-stats --load-format --tokenizer --kv-transfer-config"
    ),
    "llama.cpp": (
        "--lora --lora-scaled --mmproj --embedding --reranking --n-gpu-layers --tensor-split --flash-attn --jinja"
        " --cont-batching --batch-size --ubatch-size --mlock --model-draft --draft-max --cache-type-k --n-predict"
    ),
    "ollama": "--keepalive --verbose --nowordwrap --insecure",
}


def test_vllms_list_of_adapters_is_understood(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "--lora_modules", "a=/b", "c=/d", "--max-loras=3"]) == 0
    shown = capsys.readouterr().out
    assert '"a=/b,c=/d"' in shown
    assert re.search(r"adapters.max_adapters +3", shown)


@pytest.mark.parametrize("options", OTHER_ENGINES.values(), ids=OTHER_ENGINES)
def test_options_of_other_engines_get_an_answer(options: str, capsys: pytest.CaptureFixture[str]) -> None:
    for option in options.split():
        assert main(["serve", option, "1"]) == 2
        said = capsys.readouterr().err
        assert f"There is no option '{option}' here. " in said, said
        assert "Did you mean" not in said


@pytest.mark.parametrize("debug", [["--debug"], ["--log-level", "debug"], ["--log-level=debug"]])
def test_traceback_only_when_asked(debug: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "--port", "abc", *debug]) == 2
    assert "Traceback" in capsys.readouterr().err
    assert main(["config", "--port", "abc"]) == 2
    assert "Traceback" not in capsys.readouterr().err


def test_debug_alone_needs_a_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--debug"]) == 2
    assert "--debug needs a command" in capsys.readouterr().err


def test_unexpected_error_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("millrace.commands.version.run", lambda args: 1 // 0)
    assert main(["version"]) == 1
    err = capsys.readouterr().err
    assert "ZeroDivisionError" in err
    assert "--debug" in err
    assert err.count("\n") == 1


def test_debug_may_come_before_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--debug", "config", "--port", "abc"]) == 2
    assert "Traceback" in capsys.readouterr().err


@pytest.mark.live
def test_unknown_model_is_a_sentence_and_exit_code_1() -> None:
    done = millrace("generate", "x", "--model", "smolm2-135m-instruct")
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert "smollm2-135m-instruct" in done.stderr


@pytest.mark.live
def test_no_arguments_shows_help_and_fails() -> None:
    done = millrace()
    assert done.returncode == 2
    assert done.stdout.startswith("usage: millrace COMMAND")


@pytest.mark.live
def test_closed_pipe_gives_no_traceback() -> None:
    line = f"{sys.executable} -m millrace config | head -1"
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, timeout=60, check=False)
    assert done.stderr == ""


def test_version_prints_what_a_bug_report_needs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["version"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("millrace ")
    assert "\npython " in out
    assert "\ntorch " in out


def test_models_lists_the_default_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models", "--json"]) == 0
    names = [json.loads(line)["name"] for line in capsys.readouterr().out.splitlines()]
    assert "smollm2-135m-instruct" in names
    assert main(["models"]) == 0
    assert "SmolLM2-135M-Instruct" in capsys.readouterr().out


def test_show_says_what_is_only_about_right(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", "llama3.1-8b"]) == 0
    shown = capsys.readouterr().out
    assert "about 8.03 billion" in shown
    assert re.search(r"bytes +about [\d.]+ GB", shown)
    assert main(["show", "llama3.1-8b", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["parameters"] == 8_030_000_000


@pytest.mark.live
def test_models_shows_which_are_downloaded(tmp_path: Path) -> None:
    done = millrace("models", "--json", env={**os.environ, "XDG_CACHE_HOME": str(tmp_path)})
    assert all(json.loads(line)["cached"] is False for line in done.stdout.splitlines())


def test_ops_marks_one_version_of_each(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ops", "--device", "cpu", "--dtype", "float32", "--threads", "1"]) == 0
    out = capsys.readouterr().out
    assert "ops on cpu in float32" in out
    assert out.splitlines()[0].count("*") == 1
    assert sum(line.split()[:2][-1] == "*" or line.lstrip().startswith("*") for line in out.splitlines()[2:]) >= 8


def test_fetch_of_a_downloaded_model_prints_its_path(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fetch"]) == 0
    assert capsys.readouterr().out.startswith("smollm2-135m-instruct is in /")
    assert main(["fetch", "--all", "smollm2"]) == 2


def test_names_of_other_engines_are_understood_or_answered(capsys: pytest.CaptureFixture[str]) -> None:
    foreign = ["--max-model-len", "100", "--gpu-memory-utilization=0.5", "--served_model_name", "x", "--enforce-eager"]
    assert main(["config", "--toml", *foreign]) == 0
    printed = tomllib.loads(capsys.readouterr().out)
    assert printed["model"]["max_context"] == 100
    assert printed["memory"]["fraction"] == 0.5
    assert printed["model"]["served_name"] == "x"
    assert printed["run"]["graphs"] is False
    for option, says in (("--api-key", "--keys-file"), ("--trust-remote-code", "never run here")):
        assert main(["serve", option, "x"]) == 2
        assert says in capsys.readouterr().err
    assert main(["list", "--json"]) == 0


def test_library_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ls"]) == 0
    assert "smollm2-135m-instruct" in capsys.readouterr().out
    assert main(["show", "smollm2", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["family"], facts["sampling"]["temperature"]) == ("llama", 0.2)
    assert main(["show", "llama3.1:8b"]) == 0
    assert "meta-llama" in capsys.readouterr().out.lower()
    assert main(["show", "lama3.1"]) == 1
    assert "Did you mean 'llama3.1'?" in capsys.readouterr().err
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert main(["ps"]) == 0
    assert "No Millrace server" in capsys.readouterr().out
    assert main(["stop"]) == 1
    assert main(["rm", "smollm2"]) == 1
    assert "is not downloaded" in capsys.readouterr().err
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert main(["alias", "quick", "smollm2"]) == 0
    assert "quick now stands for smollm2. It is not downloaded: millrace pull smollm2" in capsys.readouterr().out
    assert main(["alias", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"quick": "smollm2"}
    assert main(["alias", "other", "smollm2", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"quick": "smollm2", "other": "smollm2"}


def test_a_server_is_listed_while_it_lives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with announced({}, None) as announcement:
        announcement.write("m", "http://127.0.0.1:1", "cpu", Config())
        assert [(s.model, s.pid) for s in running_servers()] == [("m", os.getpid())]
        record = json.loads(announcement.path.read_text())
        announcement.path.write_text(json.dumps({**record, "started_ticks": 1}))
        assert running_servers() == []  # Another process with the same id.
    assert not announcement.path.exists()


def test_a_server_of_several_models_is_found_by_any_of_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with announced({}, None) as announcement:
        announcement.write("first, second", "http://127.0.0.1:1", "cpu", Config())
        assert choose_server("second").pid == os.getpid()
        with pytest.raises(NotFound):
            choose_server("sec")


@pytest.mark.live  # It asks for a free port.
def test_formats_of_every_model_are_checked_at_start(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "several.toml"
    file.write_text('[models.a]\nsource = "smollm2"\n[models.b]\nsource = "smollm2"\ntool_format = "nonsense"\n')
    assert main(["serve", "--config", str(file), "--port", "0"]) == 2
    assert "tool format 'nonsense'" in capsys.readouterr().err


@pytest.mark.live
def test_doctor_finds_a_taken_port_and_a_missing_file(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        assert main(["doctor", "--json", "--port", port, "--keys-file", "/no/keys", "--threads", "999"]) == 1
    found = {(f := json.loads(line))["subject"]: f for line in capsys.readouterr().out.splitlines()}
    assert found["port"]["status"] == found["keys_file"]["status"] == "problem"
    assert "--port" in found["port"]["fix"]
    assert found["threads"]["status"] == "warning"
    assert found["torch"]["status"] == found["model"]["status"] == found["template"]["status"] == "ok"


@pytest.mark.live
def test_completion_scripts_complete(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "bash"]) == 0
    script = tmp_path / "millrace.bash"
    script.write_text(capsys.readouterr().out)
    line = "COMP_WORDS=(millrace {}); COMP_CWORD={}; _millrace; echo ${{COMPREPLY[@]}}"
    asked = ";".join(line.format(*x) for x in (("pul", 1), ("run smollm2-1", 2), ("serve --kv-g", 2)))
    done = subprocess.run(["bash", "-c", f"source {script}; {asked}"], capture_output=True, text=True, check=True)
    assert done.stdout.split("\n")[:3] == ["pull", "smollm2-135m-instruct smollm2-1.7b", "--kv-gib"]
    for shell in ("zsh", "fish"):
        assert main(["completion", shell]) == 0
        assert "millrace" in capsys.readouterr().out


@pytest.mark.live
@pytest.mark.parametrize("arguments", [["models"], ["config", "--json"], ["completion", "bash"], ["serve", "--help"]])
def test_closed_pipes_and_exit_code(arguments: list[str]) -> None:
    line = f"{sys.executable} -m millrace {' '.join(arguments)} | true; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, timeout=60, check=False)
    assert done.stderr == ""
    assert done.stdout.strip() in ("0", "141")


def test_config_and_version_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "--json", "--port", "9000"]) == 0
    port = json.loads(capsys.readouterr().out)["server.port"]
    assert (port["value"], port["source"], port["variable"]) == (9000, "command line", "MILLRACE_PORT")
    assert main(["version", "--json"]) == 0
    assert "torch" in json.loads(capsys.readouterr().out)


def test_reload_previews_what_changes_live_and_what_needs_a_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    file = tmp_path / "my.toml"
    file.write_text("[server]\nbody_limit_mb = 8\nbatch_lines = 3\nport = 99\n")
    with announced({"server.port": "8123"}, file) as announcement:
        announcement.write("m", "http://127.0.0.1:8123", "cpu", load_config(None, {"server.port": 8123}).config)
        assert main(["reload", "--dry-run"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "server.body_limit_mb: 32 → 8 (now)",
        "server.batch_lines: 64 → 3 (needs a restart)",
    ]


def test_reload_previews_the_settings_of_each_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    file = tmp_path / "my.toml"
    file.write_text("[models.chat]\nsource='a'\n[models.code]\nsource='b'\nkv_gib=2\n[models.old]\nsource='c'\n")
    settings = read_settings(str(file), {}, [])
    with announced({}, file) as announcement:
        announcement.write("chat, code, old", "http://127.0.0.1:1", "cpu", settings.config, settings.models)
        assert main(["reload", "--dry-run"]) == 0
        assert capsys.readouterr().out == "Nothing changed.\n"
        file.write_text(
            "[memory]\nfraction=0.5\n[models.chat]\nsource='a'\nkeep_alive_s=60\n[models.code]\nsource='b'\nkv_gib=3\n"
            "[models.new]\nsource='d'\n"
        )
        assert main(["reload", "--dry-run"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "models.chat.keep_alive_s: -1.0 → 60.0 (now)",
        "models.chat.fraction: 0.0 → 0.5 (needs a restart)",
        "models.code.kv_gib: 2.0 → 3.0 (needs a restart)",
        "models.code.fraction: 0.0 → 0.5 (needs a restart)",
        "models.old: 'served' → 'not served' (needs a restart)",
        "models.new: 'not served' → 'served' (needs a restart)",
    ]


@pytest.mark.live
def test_generate_streams_to_stdout_only(capsys: pytest.CaptureFixture[str]) -> None:
    with running(FakeServer()) as server:
        assert main(["generate", "one two", "--url", server.url, "--max-tokens", "3"]) == 0
        assert capsys.readouterr().out == " w0 w1 w2\n"
        assert server.requests[-1]["prompt"] == "one two"
        assert main(["generate", "--chat", "hi", "--system", "s", "--url", server.url, "--json", "--seed", "5"]) == 0
        answer = json.loads(capsys.readouterr().out)
    assert answer["text"].startswith(" w0")
    assert answer["output_tokens"] == 256
    assert [message["role"] for message in server.requests[-1]["messages"]] == ["system", "user"]
    assert server.requests[-1]["seed"] == 5


@pytest.mark.live
def test_generate_reads_standard_input() -> None:
    with running(FakeServer()) as server:
        done = millrace("generate", "-", "--url", server.url, "--max-tokens", "1", input="from a pipe")
    assert done.stdout == " w0\n"
    assert server.requests[-1]["prompt"] == "from a pipe"


def test_parsers_do_not_share_state() -> None:
    import millrace.commands.config as module

    first, second = command_parser(module, "config"), command_parser(module, "config")
    assert first.parse(["--port", "1"]) != second.parse([])


@pytest.mark.parametrize("foreign", ["--tensor-parallel-size", "--tensor_parallel_size", "--tp-size", "-tp"])
def test_other_names_of_tensor_parallel_are_ours(foreign: str) -> None:
    assert translated([f"{foreign}=2"], {"--tensor-parallel"}) == ["--tensor-parallel=2"]
