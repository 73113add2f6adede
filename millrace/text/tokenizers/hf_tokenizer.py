"""Builds the tokenizer of a Hugging Face directory from tokenizer.json and the configuration files beside it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from millrace.errors import ModelError
from millrace.text.tokenizers.tokenizer import END_NAMES, PairTemplate, Tokenizer

NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_FLAGS_OVERRIDE = ("Llama", "CodeLlama", "Gemma")
"""Tokenizer classes for which add_bos_token and add_eos_token in tokenizer_config.json override tokenizer.json."""


def build_hf_tokenizer(directory: Path, config: Mapping[str, Any]) -> Tokenizer:
    """`config` is the model's config.json. Where files disagree, the precedence is that of transformers."""
    backend = _read_backend(directory / "tokenizer.json")
    settings = _tokenizer_settings(directory)
    _add_missing(backend, settings, directory)
    named = special_tokens_of(settings)
    _mark_special(backend, settings, named)
    bos = _id_of(backend, named.get("bos_token"))
    eos = _id_of(backend, named.get("eos_token"))
    prefix, suffix = _prefix_and_suffix(backend, settings, bos, eos)
    special = frozenset(_ids_of(backend, _all_special(settings, named)))
    return Tokenizer(
        backend,
        bos_token_id=bos if bos is not None else next(iter(ids_in(config.get("bos_token_id"))), None),
        end_token_ids=_end_ids(backend, eos, directory, config),
        prefix_ids=prefix,
        suffix_ids=suffix,
        pair=_pair_template(backend),
        special_tokens=named,
        special_ids=special,
        chat_templates=_chat_templates(directory, settings),
    )


def _read_backend(path: Path) -> Backend:
    if not path.is_file():
        raise ModelError(
            f"There is no {path}, so text cannot be tokenized. Save the model's fast tokenizer there"
            " (transformers' save_pretrained writes it)."
        )
    try:
        backend = Backend.from_file(str(path))
    except Exception as error:  # tokenizers raises plain `Exception`.
        raise ModelError(f"The tokenizer {path} cannot be read: {error}. Download the file again.") from error
    # Tokenizers of encoders are often stored with both: nothing is cut or padded unasked.
    backend.no_truncation()
    backend.no_padding()
    return backend


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in the file; empty if there is no file."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} is not valid JSON: {error}. Download the file again.") from error
    if not isinstance(content, dict):
        raise ModelError(f"{path} must contain a JSON object. Download the file again.")
    return content


def _tokenizer_settings(directory: Path) -> dict[str, Any]:
    settings = read_json(directory / "tokenizer_config.json")
    if "added_tokens_decoder" not in settings:  # Older models list special tokens in a file of their own.
        settings = settings | read_json(directory / "special_tokens_map.json")
    return settings


def special_tokens_of(settings: Mapping[str, Any]) -> dict[str, str]:
    """Text of each special token by role (bos_token, …). Models may add their own roles."""
    roles = [*NAMED, *(key for key in settings if key.endswith("_token") and not key.startswith("add_"))]
    extra = settings.get("extra_special_tokens")
    found = {role: _content(settings.get(role)) for role in roles}
    if isinstance(extra, dict):
        found |= {role: _content(value) for role, value in extra.items()}
    return {role: content for role, content in found.items() if content}


def _content(token: Any) -> str | None:
    """Text of a token, which is stored as a string or as an object with matching flags."""
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else None


def _all_special(settings: Mapping[str, Any], named: Mapping[str, str]) -> list[str]:
    listed = [*_list(settings, "additional_special_tokens"), *_list(settings, "extra_special_tokens")]
    return [*named.values(), *(content for token in listed if (content := _content(token)))]


def _list(settings: Mapping[str, Any], key: str) -> list[Any]:
    value = settings.get(key)
    return value if isinstance(value, list) else []


def _add_missing(backend: Backend, settings: Mapping[str, Any], directory: Path) -> None:
    """Add tokens that only tokenizer_config.json lists. Each must get its listed id."""
    listed = settings.get("added_tokens_decoder") or {}
    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    for index, entry in sorted(((int(key), value) for key, value in listed.items()), key=lambda item: item[0]):
        content = _content(entry)
        if not content or content in known:
            continue
        backend.add_tokens([_added_token(entry, content)])
        if backend.token_to_id(content) != index:
            raise ModelError(
                f"{directory}: tokenizer_config.json gives the token {content!r} the id {index}, but tokenizer.json"
                f" gives it {backend.token_to_id(content)}. They belong to different models; download both again."
            )


def _added_token(entry: Mapping[str, Any], content: str) -> AddedToken:
    special = bool(entry.get("special", False))
    return AddedToken(
        content,
        single_word=bool(entry.get("single_word", False)),
        lstrip=bool(entry.get("lstrip", False)),
        rstrip=bool(entry.get("rstrip", False)),
        normalized=bool(entry.get("normalized", not special)),
        special=special,
    )


def _mark_special(backend: Backend, settings: Mapping[str, Any], named: Mapping[str, str]) -> None:
    """Mark tokens with a role as special, even if tokenizer.json does not."""
    tokens = dict.fromkeys(_all_special(settings, named))
    backend.add_special_tokens([AddedToken(content, special=True, normalized=False) for content in tokens])


def _prefix_and_suffix(
    backend: Backend, settings: Mapping[str, Any], bos: int | None, eos: int | None
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Ids that are added before and after a text."""
    class_name = str(settings.get("tokenizer_class", "")).removesuffix("Fast").removesuffix("Tokenizer")
    flags = [settings.get("add_bos_token"), settings.get("add_eos_token")]
    if class_name in _FLAGS_OVERRIDE and any(isinstance(flag, bool) for flag in flags):
        before = (bos,) if bos is not None and flags[0] is not False else ()
        return before, (eos,) if eos is not None and flags[1] is True else ()
    bare = backend.encode("a", add_special_tokens=False).ids
    full = backend.encode("a", add_special_tokens=True).ids
    start = next((at for at in range(len(full)) if full[at : at + len(bare)] == bare), 0)
    return tuple(full[:start]), tuple(full[start + len(bare) :])


def _pair_template(backend: Backend) -> PairTemplate:
    """How tokenizer.json joins two texts."""
    both = backend.encode("a", "b", add_special_tokens=True)
    of_first = [at for at, number in enumerate(both.sequence_ids) if number == 0]
    of_second = [at for at, number in enumerate(both.sequence_ids) if number == 1]
    if not of_first or not of_second:  # A vocabulary without these letters.
        return PairTemplate((), (), (), has_types=False)
    first, last, second, end = of_first[0], of_first[-1] + 1, of_second[0], of_second[-1] + 1
    return PairTemplate(
        tuple(both.ids[:first]),
        tuple(both.ids[last:second]),
        tuple(both.ids[end:]),
        has_types=both.type_ids[second] == 1,
    )


def _end_ids(backend: Backend, eos: int | None, directory: Path, config: Mapping[str, Any]) -> tuple[int, ...]:
    """Every token that ends a turn. If generation_config.json lists none, well-known names are added."""
    listed = ids_in(read_json(directory / "generation_config.json").get("eos_token_id"))
    ends = [*([] if eos is None else [eos]), *listed, *ids_in(config.get("eos_token_id"))]
    if not listed:
        added = backend.get_added_tokens_decoder()
        ends += [index for index in _ids_of(backend, END_NAMES) if index in added and added[index].special]
    return tuple(dict.fromkeys(ends))


def ids_in(value: Any) -> list[int]:
    """Token ids in a field that holds one id, a list of ids or null."""
    values: Iterable[Any] = value if isinstance(value, list) else [value]
    return [one for one in values if isinstance(one, int) and not isinstance(one, bool) and one >= 0]


def _id_of(backend: Backend, token: str | None) -> int | None:
    return None if token is None else backend.token_to_id(token)


def _ids_of(backend: Backend, tokens: Iterable[str]) -> list[int]:
    return [index for token in tokens if (index := backend.token_to_id(token)) is not None]


def _chat_templates(directory: Path, settings: Mapping[str, Any]) -> dict[str, str]:
    """Jinja sources by name. Template files take precedence over tokenizer_config.json."""
    found: dict[str, Any] = {}
    files = {"default": directory / "chat_template.jinja"}
    files |= {path.stem: path for path in sorted((directory / "additional_chat_templates").glob("*.jinja"))}
    for name, path in files.items():
        if path.is_file():
            found[name] = path.read_text(encoding="utf-8")
    stored = settings.get("chat_template") or read_json(directory / "chat_template.json").get("chat_template")
    if not found and isinstance(stored, list):
        found = {str(entry.get("name")): entry.get("template") for entry in stored if isinstance(entry, dict)}
    elif not found:
        found = {"default": stored}
    return {name: source for name, source in found.items() if isinstance(source, str) and source}
