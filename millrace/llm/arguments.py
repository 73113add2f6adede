"""Checks the arguments of `LLM` and its methods. Errors name the keyword argument."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from millrace.config import Config, all_settings, load_config
from millrace.errors import BadRequest, ConfigError
from millrace.params import SamplingDefaults, SamplingParams
from millrace.text.grammar.python_types import FORMATS, grammar_of

Prompt = str | Sequence[int]
"""Text or token ids."""

_PROMPT_FORMS = "give each prompt as a string or a list of token ids"
_SAMPLING_NAMES = tuple(
    declared.name for declared in msgspec.structs.fields(SamplingParams) if declared.name not in FORMATS
)


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
        if name not in _SAMPLING_NAMES:
            known = (*_SAMPLING_NAMES, *FORMATS)
            hint = _nearest(name, known) or f"It takes {', '.join(known)}."
            raise BadRequest(f"{method}() has no keyword argument '{name}'. {hint}", param=name)
    if params is None:
        fields: dict[str, Any] = {name: _plain(name, value) for name, value in keywords.items()}
        try:
            return SamplingParams(**defaults.fill(fields))
        except TypeError as error:  # A comparison with a value of another type.
            raise BadRequest(f"{method}(): a keyword argument has the wrong type: {error}.") from error
    if keywords:
        raise BadRequest(
            f"{method}() was given SamplingParams and the keyword argument '{next(iter(keywords))}'; give one of them."
        )
    return params


def _plain(name: str, value: object) -> object:
    """A single stop string or bad word, lists and dictionaries in the form that `SamplingParams` stores."""
    if name in ("stop", "bad_words") and isinstance(value, str):
        return (value,)
    if isinstance(value, Mapping):
        return tuple((int(key), bias) for key, bias in value.items())
    return tuple(value) if isinstance(value, list) else value


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
