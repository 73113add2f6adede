"""Checks the arguments of `LLM` and its methods. Errors name the keyword argument."""

from __future__ import annotations

import difflib
import numbers
import re
import typing
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from millrace.config import Config, all_settings, load_config
from millrace.errors import BadRequest, ConfigError
from millrace.params.defaults import SamplingDefaults
from millrace.params.sampling import SamplingParams
from millrace.text.grammar.python_types import FORMATS, grammar_of

Prompt = str | Sequence[int]
"""Text or token ids."""

_MAX_SHOWN_CHARS = 80
_PROMPT_FORMS = "give each prompt as a string or a list of token ids"
_FILLED_IN = {
    *("pooling", "second_from", "pooled_from", "attended", "dry_breaker_ids", "bad_word_ids", "thinking"),
}
"""Parameters that are computed from other arguments."""
_SAMPLING_TYPES = {
    name: kind
    for name, kind in typing.get_type_hints(SamplingParams).items()
    if name in SamplingParams.__struct_fields__ and name not in FORMATS and name not in _FILLED_IN
}
_GIVE = {
    "int": "an integer",
    "float": "a number",
    "bool": "True or False",
    "str": "a string",
    "array": "a list",
    "null": "None",
}


def read_config(model: str | None, keywords: Mapping[str, object]) -> Config:
    """The settings of an `LLM(model, **keywords)` call."""
    by_name = {setting.name: setting for setting in all_settings().values()}
    values: dict[str, object] = {"server.in_process": True}
    if model is not None:
        values["model.source"] = model
    for name, value in keywords.items():
        if name not in by_name:
            hint = _nearest(name, by_name) or "`millrace config` lists all settings."
            raise ConfigError(f"LLM() has no keyword argument '{name}'. {hint}", param=name)
        if name == "adapters" and isinstance(value, Mapping):
            value = _named_paths(value)
        setting = by_name[name]
        values[setting.key] = setting.convert(value, f"LLM(): keyword argument '{name}'")
    return load_config(None, values, origin="LLM()").config


def _named_paths(adapters: Mapping[str, object]) -> str:
    """{name: path} as the setting writes it."""
    for name, path in adapters.items():
        if "," in str(path):
            raise ConfigError(
                f"LLM(): the path of the adapter {name!r} has a comma: {path}. Rename it.", param="adapters"
            )
    return ",".join(f"{name}={path}" for name, path in adapters.items())


def read_params(
    method: str, params: SamplingParams | None, keywords: Mapping[str, object], defaults: SamplingDefaults
) -> SamplingParams:
    """`params` as it is, or the keywords completed by the model's defaults. `schema`, `regex`, `choice` or `grammar`,
    which say what the answer must conform to, go with both."""
    grammar = grammar_of(**{name: keywords[name] for name in FORMATS if name in keywords})
    given = {name: value for name, value in keywords.items() if name not in FORMATS}
    chosen = _read_sampling(method, params, given, defaults)
    if grammar is not None and chosen.grammar is not None:
        raise BadRequest(f"{method}() was given SamplingParams.grammar and another format; give one of them.")
    return chosen if grammar is None else msgspec.structs.replace(chosen, grammar=grammar)


def _read_sampling(
    method: str, params: SamplingParams | None, keywords: Mapping[str, object], defaults: SamplingDefaults
) -> SamplingParams:
    for name in keywords:
        if name not in _SAMPLING_TYPES:
            known = (*_SAMPLING_TYPES, *FORMATS)
            hint = _nearest(name, known) or f"It takes {', '.join(known)}."
            raise BadRequest(f"{method}() has no keyword argument '{name}'. {hint}", param=name)
    if params is None:
        fields = {name: _checked(method, name, value) for name, value in keywords.items()}
        return SamplingParams(**defaults.fill(fields))
    if keywords:
        raise BadRequest(
            f"{method}() was given SamplingParams and the keyword argument '{next(iter(keywords))}'; give one of them."
        )
    return params


def _checked(method: str, name: str, value: object) -> Any:
    """The value in the form that `SamplingParams` stores."""
    try:
        return msgspec.convert(_plain(value), _SAMPLING_TYPES[name])
    except msgspec.ValidationError as error:
        if isinstance(value, str) and name in ("stop", "bad_words"):
            return (value,)
        found = re.match(r"Expected `(.*?)`.*?(?: - at `\$(.*)`)?$", str(error))
        kinds = found[1].split(" | ") if found else []
        wanted = " or ".join(_GIVE.get(kind, kind) for kind in kinds)
        place = f"{name} (at {found[2]})" if found and found[2] else name
        raise BadRequest(
            f"{method}(): {place} has the wrong type: {_shown(value)}. Give {wanted or 'another value'}.", param=name
        ) from None


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _MAX_SHOWN_CHARS else text[:_MAX_SHOWN_CHARS] + "…"


def _plain(value: object) -> object:
    """Numbers of other libraries as Python's, a dictionary as pairs; keys of one that came as JSON are digits."""
    if isinstance(value, numbers.Integral) and not isinstance(value, bool):
        return int(value)
    if isinstance(value, numbers.Real) and not isinstance(value, bool):
        return float(value)
    if isinstance(value, Mapping):
        return [
            (int(key) if isinstance(key, str) and key.isdecimal() else _plain(key), _plain(item))
            for key, item in value.items()
        ]
    return [_plain(item) for item in value] if isinstance(value, (list, tuple)) else value


def as_batch(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str):
        return [prompts]
    if not isinstance(prompts, Sequence) or isinstance(prompts, bytes):
        raise BadRequest(f"A prompt is of type {type(prompts).__name__}; {_PROMPT_FORMS}.")
    if prompts and all(_is_token(item) for item in prompts):
        return [[int(item) for item in prompts if isinstance(item, int)]]
    batch: list[Prompt] = []
    for item in prompts:
        if isinstance(item, int):
            raise BadRequest(f"The prompts mix token ids and strings; {_PROMPT_FORMS}.")
        if not isinstance(item, str) and not (isinstance(item, Sequence) and all(map(_is_token, item))):
            raise BadRequest(f"A prompt is of type {type(item).__name__}; {_PROMPT_FORMS}.")
        batch.append(item)
    return batch


def _is_token(item: object) -> bool:
    return isinstance(item, int) and not isinstance(item, bool)


def _nearest(name: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f"Did you mean '{close[0]}'?" if close else ""
