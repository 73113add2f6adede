from __future__ import annotations

from pathlib import Path

import pytest

from millrace.errors import ConfigError
from millrace.fleet.back_off import BackOff
from millrace.fleet.run import replica_command
from millrace.fleet.settings import FleetSettings, read_fleet_file

EXAMPLE = Path(__file__).parents[2] / "deploy" / "fleet.toml"


def written(directory: Path, text: str) -> Path:
    file = directory / "fleet.toml"
    file.write_text(text)
    return file


def test_the_example_can_be_read_and_shows_the_defaults() -> None:
    file = read_fleet_file(EXAMPLE)
    assert [(one.name, one.port) for one in file.replicas] == [
        ("smollm2-135m-instruct-1", 8001),
        ("smollm2-135m-instruct-2", 8002),
    ]
    assert file.fleet == FleetSettings()
    assert file.gateway == {"port": 8080}
    assert file.directory == EXAMPLE.parent / ".millrace-fleet"


def test_commands_have_the_variables_and_options_of_their_table(tmp_path: Path) -> None:
    text = """
[[serve]]
model = "org/m"
port = 9000
args = ["--kv-tokens", "64"]
environment = { CUDA_VISIBLE_DEVICES = "1" }
"""
    [replica] = read_fleet_file(written(tmp_path, text)).replicas
    assert replica_command(replica, ["millrace"]) == [
        *("env", "CUDA_VISIBLE_DEVICES=1", "millrace", "serve", "org/m", "--host", "127.0.0.1", "--port", "9000"),
        *("--header-limit-kb", "256", "--kv-tokens", "64"),
    ]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "names no replica"),
        ("[[serve]]\nmodel = 'm'\n", "missing required field `port`"),
        ("[[serve]]\nmodel = 'm'\nport = 8001\nthreads = 2\n", "unknown field `threads`"),
        ("[[serve]]\nmodel = 'm'\nport = 0\n", "has port 0"),
        ("[[serve]]\nmodel = 'm'\nport = 65535\ncount = 2\n", "has port 65535"),
        ("[[serve]]\nmodel = 'm'\nport = 1\ncount = 0\n", "has count 0"),
        ("[[serve]]\nmodel = 'm'\nport = 1\nname = 'a/b'\n", "'a/b' may have letters"),
        ("[[serve]]\nmodel = 'm'\nport = 8080\n[gateway]\n", "the same port, 8080"),
        ("[[serve]]\nmodel = 'm'\nport = 1\n[[serve]]\nmodel = 'm'\nport = 2\n", "the same name, m"),
        ("[[serve]]\nmodel = 'm'\nport = 1\nargs = ['--port', '2']\n", "use 'port' and 'host'"),
        ("[[serve\n", "is wrong"),
    ],
)
def test_mistakes_are_named(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_fleet_file(written(tmp_path, text))
    assert said in caught.value.message


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="Cannot read"):
        read_fleet_file(tmp_path / "none.toml")


def test_waits_double_up_to_a_limit_and_a_steady_process_starts_over() -> None:
    back_off = BackOff(FleetSettings(back_off_s=1.0, max_back_off_s=10.0, steady_s=60.0))
    assert [back_off.after(0.1) for _ in range(6)] == [1.0, 2.0, 4.0, 8.0, 10.0, 10.0]
    assert back_off.after(61.0) == 1.0
    assert back_off.after(0.1) == 2.0
