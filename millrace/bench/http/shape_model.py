"""Writes a folder for `millrace serve random:FOLDER`: a model shape with a real tokenizer and chat template."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from millrace.sources.resolve import resolve_model
from millrace.text.tokenizers.load import load_tokenizer


def write_shape_model(folder: Path, shape: Path, tokenizer_of: str) -> None:
    """`tokenizer_of` is a model whose vocabulary is not larger than the shape's."""
    tokenizer = load_tokenizer(resolve_model(tokenizer_of))
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(shape, folder / "config.json")
    (folder / "tokenizer.json").write_text(tokenizer.to_json(), encoding="utf-8")
    settings = {**tokenizer.special_tokens, "chat_template": tokenizer.chat_templates.get("default", "")}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, ensure_ascii=False), encoding="utf-8")
