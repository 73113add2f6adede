"""Each server has a data directory of its own, unless `--data-dir` shares one."""

from __future__ import annotations

from pathlib import Path

import pytest

from millrace.config import ServerConfig
from millrace.errors import ConfigError
from millrace.serve.data_directory import DATABASE, data_directory, held, other_data

MODEL = "org/model"


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    return tmp_path / "millrace"


@pytest.mark.parametrize(
    ("server", "folder"),
    [
        (ServerConfig(), "org_model"),
        (ServerConfig(port=8001), "org_model-8001"),
        (ServerConfig(port=8001, name="chat"), "chat"),
        (ServerConfig(name=".."), "_."),
        (ServerConfig(name="../chat"), "_._chat"),
    ],
)
def test_the_directory_follows_from_model_and_port_or_the_name(server: ServerConfig, folder: str, home: Path) -> None:
    assert data_directory(server, MODEL) == home / folder


def test_a_directory_that_is_given_is_used_as_it_is(tmp_path: Path) -> None:
    shared = str(tmp_path / "shared")
    assert data_directory(ServerConfig(name="chat", data_dir=shared), MODEL) == Path(shared)


def test_a_second_server_is_told_who_holds_the_directory(home: Path) -> None:
    directory = home / "chat"
    with held(directory):
        with pytest.raises(ConfigError, match=r"Another server stores .*chat.* --name, .*--data-dir"), held(directory):
            pass
        with held(home / "other"):
            pass
    with held(directory):
        assert directory.exists()


def test_only_a_directory_in_which_something_was_stored_is_kept(home: Path) -> None:
    for name in ("empty", "used"):
        with held(home / name):
            if name == "used":
                (home / name / DATABASE).touch()
    assert not (home / "empty").exists()
    assert (home / "used" / DATABASE).exists()
    with held(home / "used"):
        pass
    assert (home / "used" / DATABASE).exists()


def test_a_server_also_starts_where_nothing_can_be_stored(home: Path) -> None:
    home.write_text("not a directory")
    with held(home / "chat"):
        pass


def test_data_in_the_directory_of_another_server_is_mentioned_until_there_is_own_data(home: Path) -> None:
    server = ServerConfig(port=8001)
    assert other_data(server, MODEL) == ""
    (home / "org_model").mkdir(parents=True)
    (home / "org_model" / DATABASE).touch()
    assert str(home / "org_model ") in other_data(server, MODEL)
    assert str(home / "org_model ") in other_data(ServerConfig(name="chat"), MODEL)
    assert other_data(ServerConfig(), MODEL) == ""
    assert other_data(ServerConfig(port=8001, data_dir="/elsewhere"), MODEL) == ""
    own = data_directory(server, MODEL)
    own.mkdir()
    (own / DATABASE).touch()
    assert other_data(server, MODEL) == ""
