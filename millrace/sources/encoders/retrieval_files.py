"""What the files of sparse (SPLADE) and multi-vector (ColBERT) encoders say."""

from __future__ import annotations

import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from millrace.errors import ModelError
from millrace.sources.encoders.json_files import json_file

Role = Literal["query", "document"]
Kinds = Sequence[tuple[str, Path]]
"""Modules in their order: the class's name and the folder."""

_DEFAULT_QUERY_TOKENS = 32
"""ColBERT's width of queries, where files name none."""
_PYLATE_KEYS = ("query_prefix", "document_prefix", "do_query_expansion", "attend_to_expansion_tokens", "skiplist_words")


@dataclass(frozen=True, slots=True)
class SparseForm:
    """Weights of vocabulary tokens from the logits of a masked language model."""

    pooling: Literal["max", "sum"] = "max"
    num_logs: int = 1
    """How often log(1 + x) is taken of the positive logits."""


@dataclass(frozen=True, slots=True)
class Expansion:
    """Queries are filled up to `length` with mask tokens, whose vectors count too."""

    length: int
    is_fixed: bool = True
    """True: no query may be longer."""
    is_attended: bool = False
    """False: other tokens do not attend to the mask tokens."""
    token: str = ""
    """"": the tokenizer's mask token, else its end token."""


@dataclass(frozen=True, slots=True)
class MultiForm:
    """A vector per token; two texts are compared by the sum of each query token's best match (MaxSim)."""

    query_tokens: int = 0
    """Longest query; 0: as long as the model reads."""
    document_tokens: int = 0
    expansion: Expansion | None = None
    markers: Mapping[Role, str] = field(default_factory=dict)
    """Tokens after the first special ones, which PyLate and Stanford's ColBERT insert."""
    skipped_words: tuple[str, ...] = ()
    """Tokens whose vectors are left out, such as punctuation."""
    skips_in: tuple[str, ...] = ("document",)
    """Roles in which they are left out."""
    takes_mean: bool = False
    """MaxSim is divided by the number of query tokens."""
    is_pylate: bool = False
    """Saved by PyLate, which normalises without a module of its own."""


def sparse_form(kinds: Kinds) -> SparseForm | None:
    """None for a model without SPLADE's pooling."""
    folder = next((folder for kind, folder in kinds if kind == "SpladePooling"), None)
    if folder is None:
        return None
    others = [kind for kind, _ in kinds if kind in ("Pooling", "Dense", "Normalize", "MultiVectorMask")]
    if others:
        raise ModelError(f"{folder.parent / 'modules.json'} has {others[0]} beside SpladePooling; remove one.")
    settings = json_file(folder / "config.json", dict) or {}
    pooling, activation = settings.get("pooling_strategy", "max"), settings.get("activation_function", "relu")
    if pooling not in ("max", "sum") or activation not in ("relu", "log1p_relu"):
        raise ModelError(
            f"{folder / 'config.json'} sets {pooling!r} and {activation!r}; known are max, sum; relu, log1p_relu."
        )
    return SparseForm(pooling, 1 if activation == "relu" else 2)


def multi_form(folder: Path, kinds: Kinds, *, is_stanford: bool = False) -> MultiForm | None:
    """None for a model that does not compare token by token."""
    saved = json_file(folder / "config_sentence_transformers.json", dict) or {}
    mask = next((place for kind, place in kinds if kind == "MultiVectorMask"), None)
    if is_stanford:
        return _stanford(json_file(folder / "artifact.metadata", dict) or {})
    is_pylate = saved.get("model_type") == "ColBERT" or (mask is None and any(key in saved for key in _PYLATE_KEYS))
    if mask is None and not is_pylate:
        return None
    if any(kind == "Pooling" for kind, _ in kinds):
        raise ModelError(f"{folder / 'modules.json'} pools tokens, but the model compares them; remove one of both.")
    own = {**saved, **(json_file(folder / "sentence_bert_config.json", dict) or {})}
    masking = (json_file(mask / "config.json", dict) or {}) if mask is not None else {}
    if masking.get("keep_only_token_ids"):
        raise ModelError(f"{folder / 'modules.json'}: keep_only_token_ids is for pictures, which are not supported.")
    words = masking.get("skiplist_words") if mask is not None else saved.get("skiplist_words")
    if words is None:
        words = [] if mask is not None else list(string.punctuation)
    expansion = _expansion(own, is_pylate)
    markers: dict[Role, str] = {}
    if is_pylate:
        markers = {"query": str(saved.get("query_prefix") or ""), "document": str(saved.get("document_prefix") or "")}
    return MultiForm(
        query_tokens=int(own.get("query_length") or 0) if expansion is None or not expansion.is_fixed else 0,
        document_tokens=int(own.get("document_length") or 0),
        expansion=expansion,
        markers=markers,
        skipped_words=tuple(map(str, words)),
        skips_in=tuple(masking.get("skiplist_tasks") or ("document",)),
        takes_mean=saved.get("similarity_fn_name") == "meanmaxsim",
        is_pylate=is_pylate,
    )


def _expansion(settings: Mapping[str, Any], is_pylate: bool) -> Expansion | None:
    """sentence-transformers stores a section; PyLate stored flags, with expansion as the default."""
    own = settings.get("query_expansion")
    if isinstance(own, dict):
        length, strategy = int(own.get("length") or 0), own.get("strategy")
        if length < 1 or strategy not in ("fixed", "min"):
            raise ModelError(f"query_expansion is {own!r}; it needs a length and the strategy 'fixed' or 'min'.")
        return Expansion(length, strategy == "fixed", bool(own.get("attend")), str(own.get("token") or ""))
    if not is_pylate or "query_expansion" in settings or settings.get("do_query_expansion") is False:
        return None
    attended = settings.get("attend_to_expansion_tokens", settings.get("attend_to_mask_tokens"))
    return Expansion(int(settings.get("query_length") or _DEFAULT_QUERY_TOKENS), is_attended=bool(attended))


def _stanford(metadata: Mapping[str, Any]) -> MultiForm:
    attended, length = bool(metadata.get("attend_to_mask_tokens")), metadata.get("query_maxlen")
    return MultiForm(
        document_tokens=int(metadata.get("doc_maxlen") or 0),
        expansion=Expansion(int(length or _DEFAULT_QUERY_TOKENS), is_attended=attended),
        markers={
            "query": f"{metadata.get('query_token_id') or '[unused0]'} ",
            "document": f"{metadata.get('doc_token_id') or '[unused1]'} ",
        },
        skipped_words=tuple(string.punctuation) if metadata.get("mask_punctuation", True) else (),
        is_pylate=True,
    )
