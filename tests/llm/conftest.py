"""A tiny model with random weights that answers conversations: what it says is noise, unless a grammar holds it."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from helpers.tiny_models import config_of, make_reference

from millrace.llm import LLM

TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    folder = tmp_path_factory.mktemp("tiny")
    sizes = {"vocab_size": 300, "max_position_embeddings": 2048}
    (folder / "config.json").write_text(json.dumps({**config_of(make_reference("llama")), **sizes}))
    (folder / "template.jinja").write_text(TEMPLATE)
    with LLM(
        f"random:{folder}/config.json",
        device="cpu",
        dtype="float32",
        kv_tokens=8192,
        chat_template=str(folder / "template.jinja"),
    ) as opened:
        yield opened
