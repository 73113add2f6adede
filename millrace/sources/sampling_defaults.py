"""The sampling that a model's authors recommend: from its files, else from the table of known models.

The only owner of this fact. Fronts, `LLM` and the commands ask here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from millrace.config import GenerationDefaults
from millrace.errors import BadRequest, ModelError
from millrace.params.defaults import NEUTRAL_DEFAULTS, SamplingDefaults
from millrace.params.sampling import SamplingParams
from millrace.sources.catalogue import entry_of_files
from millrace.sources.hf_config import read_json_object
from millrace.sources.known_models import find_known

if TYPE_CHECKING:
    from millrace.sources.resolve import ModelFiles

_NAMES = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
_GGUF_NAMES = {
    "general.sampling.temp": "temperature",
    "general.sampling.top_p": "top_p",
    "general.sampling.top_k": "top_k",
    "general.sampling.min_p": "min_p",
    "general.sampling.penalty_repeat": "repetition_penalty",
}


def sampling_defaults(files: ModelFiles, choice: GenerationDefaults) -> SamplingDefaults:
    """Defaults for requests that leave sampling fields out. The first source that names any field is used alone."""
    if choice == "neutral" or files.kind == "random":
        return NEUTRAL_DEFAULTS
    found = _from_gguf(files) if files.kind == "gguf" else _from_generation_config(files)
    return found or from_tables(files.name) or NEUTRAL_DEFAULTS


def _from_generation_config(files: ModelFiles) -> SamplingDefaults | None:
    path = files.path / "generation_config.json"
    if not path.is_file():
        return None
    return _defaults({name: read_json_object(path).get(name) for name in _NAMES}, "generation_config.json", str(path))


def _from_gguf(files: ModelFiles) -> SamplingDefaults | None:
    from millrace.sources.gguf.model import open_gguf_model  # Imports NumPy, which `millrace config` does not need.

    metadata = open_gguf_model(files.path).metadata
    return _defaults({ours: metadata.get(key) for key, ours in _GGUF_NAMES.items()}, "GGUF metadata", str(files.path))


def from_tables(name: str) -> SamplingDefaults | None:
    """The recommendation of a known model or catalogue entry."""
    known = find_known(name)
    entry = None if known is not None else entry_of_files(name)
    table = known.sampling if known is not None else entry.sampling if entry is not None else {}
    return _defaults(table, "table of known models", name)


def _defaults(found: Mapping[str, Any], source: str, where: str) -> SamplingDefaults | None:
    """Checked, because a file may contain anything. None if `found` names no field."""
    given = {name: value for name, value in found.items() if value is not None}
    if not given:
        return None
    if given.get("top_k") == -1:
        given["top_k"] = 0
    try:
        for name, value in given.items():
            if isinstance(value, bool) or not isinstance(value, int if name == "top_k" else (int, float)):
                raise BadRequest(f"{name} is {value!r}, which is not a number.")
        SamplingParams(**given)
    except BadRequest as error:
        raise ModelError(
            f"The recommended sampling in {where} cannot be used: {error.message} Correct it there, or start with"
            " --generation-defaults neutral."
        ) from error
    return SamplingDefaults(source=source, **given)
