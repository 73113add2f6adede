"""Ollama's Modelfile: what is read, and what is refused with its line."""

from __future__ import annotations

from pathlib import Path

import pytest

from millrace.errors import ModelError
from millrace.sources.adapters.modelfile import read_modelfile

WHOLE = '''\
# A pirate.
from tiny
ADAPTER ./pirate/adapter_model.safetensors
SYSTEM """You are a pirate.
Say "arr"."""
PARAMETER temperature 0.5
parameter top_k 7
PARAMETER\tnum_ctx\t2048
PARAMETER use_mmap false
PARAMETER stop "two words"
PARAMETER stop END
LICENSE "MIT"
'''


def test_all_of_it(tmp_path: Path) -> None:
    folder = tmp_path / "pirate"
    folder.mkdir()
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (folder / name).touch()
    (tmp_path / "Modelfile").write_text(WHOLE)
    found = read_modelfile(tmp_path / "Modelfile")
    assert (found.source, found.system, found.licence) == ("tiny", 'You are a pirate.\nSay "arr".', "MIT")
    assert found.parameters == {
        "temperature": 0.5,
        "top_k": 7,
        "num_ctx": 2048,
        "use_mmap": False,
        "stop": ["two words", "END"],
    }
    assert found.adapter_files() == [folder / "adapter_config.json", folder / "adapter_model.safetensors"]


@pytest.mark.parametrize(
    ("written", "system"),
    [
        ("as it is \t", "as it is"),
        ('"one line"  ', "one line"),
        ('"""one line"""', "one line"),
        ('"a "quoted" word"', 'a "quoted" word'),
        ('"""He said "arr""""', 'He said "arr"'),
        ('"""\n two \n\nlines\n"""', "\n two \n\nlines\n"),
        ('"over\ntwo lines"', "over\ntwo lines"),
        ('half "quoted"', 'half "quoted"'),
        ('half """quoted"""', 'half """quoted"""'),
        ('""', ""),
    ],
)
def test_a_value_ends_at_its_closing_quotes(tmp_path: Path, written: str, system: str) -> None:
    (tmp_path / "Modelfile").write_text(f"FROM a\nSYSTEM {written}\nPARAMETER top_k 7\n")
    found = read_modelfile(tmp_path / "Modelfile")
    assert (found.system, found.parameters) == (system, {"top_k": 7})


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("SYSTEM x", "no FROM"),
        ("FROM a\nTEMPLATE {{ .Prompt }}", "line 2: TEMPLATE is not supported"),
        ("FROM a\nMESSAGE user hi", "line 2: MESSAGE is not supported"),
        ("FROM a\n\nRUN x", "line 3"),
        ('FROM a\nSYSTEM """x', "not closed"),
        ('FROM a\nSYSTEM "x', "not closed"),
        ('FROM a\nSYSTEM """x\ny""" and more\n"""', 'line 2: there is text after the closing """: \'and more\''),
        ('FROM a\nSYSTEM "x" and more', "line 2: there is text after"),
        ('FROM a\nPARAMETER stop "x" "y" z', "line 2: there is text after"),
        ("FROM a\nFROM b", "line 2: this is a second FROM"),
        ("FROM a\nPARAMETER top_k many", "no number"),
        ("FROM a\nPARAMETER top_p nan", "no number"),
        ("FROM a\nPARAMETER top_p", "no number"),
        ("FROM a\nADAPTER .", "GGUF adapters and pickles are not read"),
    ],
)
def test_refused(tmp_path: Path, text: str, what: str) -> None:
    (tmp_path / "Modelfile").write_text(text)
    with pytest.raises(ModelError, match=what):
        read_modelfile(tmp_path / "Modelfile").adapter_files()
