"""The offline interface: errors about keyword arguments, and reprs that fit on a line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from helpers.tiny_models import config_of, make_reference

from millrace.errors import ConfigError
from millrace.llm import LLM, Choice, Generation
from millrace.params import SamplingParams


@pytest.mark.parametrize(
    ("keywords", "says"),
    [
        ({"dtpye": "float32"}, r"LLM\(\) has no keyword argument 'dtpye'\. Did you mean 'dtype'\?"),
        ({"zzzzzzzz": 1}, r"LLM\(\) has no keyword argument 'zzzzzzzz'\. `millrace config` lists all settings\."),
        ({"dtype": "int3"}, r"LLM\(\): keyword argument 'dtype' is 'int3'; it must be one of auto, float32"),
        ({"kv_tokens": 1.5}, r"LLM\(\): keyword argument 'kv_tokens' is 1\.5; it must be a whole number of at least 0"),
    ],
)
def test_error_names_the_keyword_argument(keywords: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError, match=says) as raised:
        LLM(**keywords)
    assert "command line" not in str(raised.value)


def test_reprs_of_outputs_are_short() -> None:
    choice = Choice(0, "a" * 500, list(range(500)), "stop", "END")
    assert repr(choice) == (
        f"Choice(index=0, text='{'a' * 59}…', num_tokens=500, finish_reason='stop', stopped_by='END')"
    )
    generation = Generation(list(range(1000)), [choice], cached_tokens=16)
    assert repr(generation) == f"Generation(num_prompt_tokens=1000, cached_tokens=16, choices=[{choice!r}])"


def test_repr_names_model_and_device_until_it_is_closed(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config_of(make_reference("llama"))))
    source = f"random:{path}"
    with LLM(source, device="cpu", dtype="float32", kv_tokens=512) as llm:
        assert repr(llm).startswith(f"LLM('{source}', device='cpu")
        assert "dtype='float32'" in repr(llm)
        (generation,) = llm.generate("ab", SamplingParams(max_tokens=3, ignore_eos=True))
        assert "num_tokens=3" in repr(generation)
    assert repr(llm) == f"LLM('{source}', closed)"
