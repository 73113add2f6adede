"""The files in deploy/ and the pages about them name only options that exist, and the files can be read."""

from __future__ import annotations

import argparse
import re
import tomllib
from pathlib import Path

import pytest
import yaml

from millrace.commands import serve

ROOT = Path(__file__).parents[1]
FILES = sorted((ROOT / "deploy").iterdir())
PAGES = [ROOT / "docs" / "deployment.md", ROOT / "docs" / "several-models.md"]
OF_OTHER_PROGRAMS = {
    *("--no-deps", "--no-cache-dir", "--no-install-recommends", "--index-url", "--create-home", "--uid", "--gpus"),
    *("--from", "--start-period", "--plat-name"),
    "--steps",  # Of `millrace trace`.
    "--operator",  # Of `millrace keys`.
    "--check",  # Of `millrace up`.
}


@pytest.mark.parametrize("path", [*FILES, *PAGES], ids=lambda path: path.name)
def test_every_option_exists(path: Path) -> None:
    parser = argparse.ArgumentParser()
    serve.add_arguments(parser)
    # argparse has no public list of options.
    known = set(parser._option_string_actions) | OF_OTHER_PROGRAMS
    found = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", path.read_text(encoding="utf-8")))
    assert found <= known


@pytest.mark.parametrize("name", ["compose.yaml", "kubernetes.yaml"])
def test_yaml_can_be_read(name: str) -> None:
    assert all(yaml.safe_load_all((ROOT / "deploy" / name).read_text(encoding="utf-8")))


def test_variables_of_the_kubernetes_service_are_not_read_as_settings() -> None:
    objects = yaml.safe_load_all((ROOT / "deploy" / "kubernetes.yaml").read_text(encoding="utf-8"))
    pods = [one["spec"]["template"]["spec"] for one in objects if one["kind"] == "Deployment"]
    assert [pod["enableServiceLinks"] for pod in pods] == [False]


def test_the_image_is_built_from_all_that_the_wheel_needs() -> None:
    kept = {line[1:] for line in (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines() if line[:1] == "!"}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert kept == {"pyproject.toml", "setup.py", "millrace", project["readme"], *project["license-files"]}
