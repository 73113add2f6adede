"""Builds the tokenizer described by GGUF metadata: byte-level BPE ("gpt2"), SentencePiece BPE ("llama"), an encoder's.

It gives the same ids as the model's original tokenizer. Missing metadata is filled in by family: SentencePiece adds BOS
and a leading space; Gemma adds BOS but no space.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tokenizers import AddedToken, decoders, normalizers
from tokenizers import Tokenizer as Backend
from tokenizers.models import BPE

from millrace.errors import ModelError
from millrace.text.tokenizers.gguf_encoder_tokenizer import unigram, word_piece
from millrace.text.tokenizers.gguf_vocabulary import (
    CONTROL,
    NORMAL,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
    Vocabulary,
    vocabulary_of,
)
from millrace.text.tokenizers.merge_cache import merges_of
from millrace.text.tokenizers.pre_tokenizers import Recipe, recipe_for
from millrace.text.tokenizers.spm_merges import Merge
from millrace.text.tokenizers.token_table import SPACE_MARK
from millrace.text.tokenizers.tokenizer import END_NAMES, Tokenizer

_NAMED = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
    "sep_token": "seperator_token_id",
    "mask_token": "mask_token_id",
}
_SPM_DEFAULT_IDS = {"bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0}


def build_gguf_tokenizer(metadata: Mapping[str, Any], where: str) -> Tokenizer:
    """`where` is the file, for error messages."""
    vocabulary = vocabulary_of(metadata, where)
    model = vocabulary.get("model")
    try:
        if model == "gpt2":
            return _byte_level(vocabulary)
        if model == "llama":
            return _sentence_piece(vocabulary)
        if model == "bert":
            return word_piece(vocabulary)
        if model == "t5":
            return unigram(vocabulary)
    except ModelError:
        raise
    except Exception as error:  # tokenizers raises plain `Exception`, for example for merges of unknown tokens.
        raise ModelError(
            f"{where}: the tokenizer cannot be built: {error}. The file is damaged; download it again."
        ) from error
    raise ModelError(
        f"{where}: tokenizer.ggml.model is '{model}', which is not supported; 'gpt2', 'llama', 'bert' and 't5' are."
        " Serve the model from its Hugging Face directory (with tokenizer.json) instead."
    )


# ── byte-level BPE ────────────────────────────────────────────────────────────────────────────────────────────────────
def _byte_level(vocabulary: Vocabulary) -> Tokenizer:
    recipe = recipe_for(_pre_name(vocabulary), vocabulary.where)
    ids = _ids(vocabulary, vocabulary.tokens)
    backend = Backend(BPE(vocab=ids, merges=_stored_merges(vocabulary), ignore_merges=recipe.whole_words))
    normalizer = recipe.normalizer()
    if normalizer is not None:
        backend.normalizer = normalizer
    backend.pre_tokenizer = recipe.pre_tokenizer(space_first=vocabulary.flag("add_space_prefix", False))
    backend.decoder = decoders.ByteLevel()
    _add_tokens(backend, vocabulary, vocabulary.tokens)
    return _finish(backend, vocabulary, adds_bos=_adds_bos(vocabulary, recipe))


def _adds_bos(vocabulary: Vocabulary, recipe: Recipe) -> bool:
    return vocabulary.flag("add_bos_token", recipe.adds_bos)


def _pre_name(vocabulary: Vocabulary) -> str:
    """Name of the pre-tokenizer. Files older than this key are recognised by architecture or by a token."""
    name = vocabulary.get("pre")
    if name:
        return str(name)
    if vocabulary.architecture.startswith(("qwen2", "qwen3")):
        return "qwen2"
    if "<|begin_of_text|>" in vocabulary.tokens:
        return "llama-bpe"
    return "default"


def _stored_merges(vocabulary: Vocabulary) -> list[Merge]:
    merges = vocabulary.get("merges")
    if not isinstance(merges, list):
        raise ModelError(f"{vocabulary.where} has no merges (tokenizer.ggml.merges); convert the model again.")
    pairs: list[Merge] = []
    for merge in merges:
        cut = merge.find(" ", 1)
        pairs.append((merge[:cut], merge[cut + 1 :]))
    return pairs


# ── SentencePiece BPE ─────────────────────────────────────────────────────────────────────────────────────────────────
def _sentence_piece(vocabulary: Vocabulary) -> Tokenizer:
    tokens = _with_space_marks(vocabulary)
    ids = _ids(vocabulary, tokens)
    unknown = vocabulary.token_id("unknown_token_id", _SPM_DEFAULT_IDS["unknown_token_id"])
    merges = _stored_merges(vocabulary) if vocabulary.get("merges") else merges_of(ids, _scores(vocabulary))
    backend = Backend(
        BPE(
            vocab=ids,
            merges=merges,
            unk_token=tokens[unknown] if unknown is not None else None,
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    space_first = vocabulary.flag("add_space_prefix", not vocabulary.is_gemma)
    spaces = normalizers.Replace(" ", SPACE_MARK)
    backend.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE_MARK), spaces]) if space_first else spaces
    steps: list[Any] = [decoders.Replace(SPACE_MARK, " "), decoders.ByteFallback(), decoders.Fuse()]
    if space_first:
        steps.append(decoders.Strip(" ", 1, 0))
    backend.decoder = decoders.Sequence(steps)
    _add_tokens(backend, vocabulary, tokens)
    # Gemma writes nonsense without BOS, and some converted files set add_bos_token to false.
    return _finish(backend, vocabulary, adds_bos=vocabulary.is_gemma or vocabulary.flag("add_bos_token", True))


def _with_space_marks(vocabulary: Vocabulary) -> list[str]:
    """Runs of spaces with U+2581, as in the merges. Converters write these tokens with plain spaces."""
    return [token.replace(" ", SPACE_MARK) if token.isspace() else token for token in vocabulary.tokens]


def _scores(vocabulary: Vocabulary) -> list[float]:
    """SentencePiece scores, 0 for tokens that were not learned. If the file has no usable scores, the order of ids."""
    types, scores = vocabulary.types, vocabulary.get("scores")
    learned = {score for score, kind in zip(scores, types, strict=True) if kind == NORMAL} if scores else set()
    if len(learned) <= 1:
        return [float(-index) for index in range(len(types))]
    return [float(score) if kind == NORMAL else 0.0 for score, kind in zip(scores, types, strict=True)]


# ── both ──────────────────────────────────────────────────────────────────────────────────────────────────────────────
def _ids(vocabulary: Vocabulary, tokens: Sequence[str]) -> dict[str, int]:
    """Tokens to ids, without the unused `[PAD<id>]` tokens that pad the embedding: no text may encode to them."""
    if UNUSED not in vocabulary.types:
        return dict(zip(tokens, range(len(tokens)), strict=True))
    kinds = zip(tokens, vocabulary.types, strict=True)
    return {
        token: index for index, (token, kind) in enumerate(kinds) if not (kind == UNUSED and token == f"[PAD{index}]")
    }


def _add_tokens(backend: Backend, vocabulary: Vocabulary, tokens: Sequence[str]) -> None:
    """Add the tokens that are matched before pre-tokenization. Control tokens can be hidden when decoding."""
    kinds = list(enumerate(vocabulary.types))
    if vocabulary.get("token_type") is None:  # Then at least BOS and the end tokens must be matched.
        named = (vocabulary.token_id(key) for key in ("bos_token_id", "eos_token_id", "eot_token_id"))
        kinds = [(index, CONTROL) for index in named if index is not None]
    added = [
        AddedToken(tokens[index], special=kind != USER_DEFINED, normalized=False)
        for index, kind in kinds
        if kind in (CONTROL, USER_DEFINED, UNKNOWN) and tokens[index]
    ]
    if added:
        backend.add_tokens(added)


def _finish(backend: Backend, vocabulary: Vocabulary, *, adds_bos: bool) -> Tokenizer:
    defaults = _SPM_DEFAULT_IDS if vocabulary.get("model") == "llama" else {}
    named = {name: vocabulary.token_id(key, defaults.get(key)) for name, key in _NAMED.items()}
    bos, eos = named["bos_token"], named["eos_token"]
    ends = [eos, vocabulary.token_id("eot_token_id"), vocabulary.token_id("eom_token_id")]
    by_name = (backend.token_to_id(name) for name in END_NAMES)
    ends += [index for index in by_name if index is not None and vocabulary.types[index] == CONTROL]
    return Tokenizer(
        backend,
        vocab_size=len(vocabulary.tokens),
        bos_token_id=bos,
        end_token_ids=tuple(dict.fromkeys(end for end in ends if end is not None)),
        prefix_ids=(bos,) if adds_bos and bos is not None else (),
        suffix_ids=(eos,) if vocabulary.flag("add_eos_token", False) and eos is not None else (),
        special_tokens={name: vocabulary.tokens[index] for name, index in named.items() if index is not None},
        chat_templates=_chat_templates(vocabulary.metadata),
    )


def _chat_templates(metadata: Mapping[str, Any]) -> dict[str, str]:
    """Jinja sources by name: `tokenizer.chat_template` is the default, other keys end in the template's name."""
    found = {"default": metadata.get("tokenizer.chat_template")}
    for key, value in metadata.items():
        if key.startswith("tokenizer.chat_template."):
            found[key.removeprefix("tokenizer.chat_template.")] = value
    return {name: source for name, source in found.items() if isinstance(source, str) and source}
