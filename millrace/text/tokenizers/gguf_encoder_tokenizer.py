"""Tokenizers of encoders in GGUF files: WordPiece ("bert") and SentencePiece unigram ("t5")."""

from __future__ import annotations

import re
from collections.abc import Sequence

from tokenizers import AddedToken, Regex, decoders, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend
from tokenizers.models import Unigram, WordPiece

from millrace.errors import ModelError
from millrace.text.tokenizers.gguf_vocabulary import CONTROL, NORMAL, UNKNOWN, UNUSED, USER_DEFINED, Vocabulary
from millrace.text.tokenizers.token_table import SPACE_MARK
from millrace.text.tokenizers.tokenizer import PairTemplate, Tokenizer

_ROLES = ("unknown", "seperator", "padding", "mask", "cls", "bos", "eos")
"""As GGUF writes them."""
_LONGEST_WORD = 100
_NAME = re.compile(r"\[\w+\]")
"""Of a special token; older files do not mark [unused0] as one."""


def word_piece(vocabulary: Vocabulary) -> Tokenizer:
    """GGUF marks the beginnings of words where BERT's files mark the other pieces, with ##."""
    special = _special_ids(vocabulary)
    tokens = [
        token
        if index in special or _NAME.fullmatch(token)
        else token[1:]
        if token.startswith(SPACE_MARK)
        else f"##{token}"
        for index, token in enumerate(vocabulary.tokens)
    ]
    unknown = vocabulary.token_id("unknown_token_id", 100)
    if unknown is None:
        raise ModelError(f"{vocabulary.where} names no unknown token. Convert the model again.")
    model = WordPiece(
        {token: index for index, token in enumerate(tokens)},
        unk_token=tokens[unknown],
        max_input_chars_per_word=_LONGEST_WORD,
    )
    backend = Backend(model)
    is_cased = any(any(map(str.isupper, token)) for index, token in enumerate(tokens) if index not in special)
    backend.normalizer = normalizers.BertNormalizer(lowercase=not is_cased)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    # Older files have the first token of a text as their BOS token.
    first = vocabulary.token_id("cls_token_id", vocabulary.token_id("bos_token_id", 101))
    last = vocabulary.token_id("seperator_token_id", vocabulary.token_id("eos_token_id", 102))
    return _finish(backend, vocabulary, tokens, special, first, last, num_between=1)


def unigram(vocabulary: Vocabulary) -> Tokenizer:
    """Of XLM-RoBERTa: `<s> a </s>`, and `<s> a </s></s> b </s>` for two texts."""
    tokens, scores = vocabulary.tokens, vocabulary.get("scores")
    if not scores:
        raise ModelError(f"{vocabulary.where} has no scores (tokenizer.ggml.scores). Convert the model again.")
    unknown = vocabulary.token_id("unknown_token_id", 3)
    backend = Backend(Unigram([(token, float(score)) for token, score in zip(tokens, scores, strict=True)], unknown))
    steps: list[normalizers.Normalizer] = []
    charsmap = vocabulary.get("precompiled_charsmap")
    if charsmap:
        steps.append(normalizers.Precompiled(bytes(charsmap)))
    if vocabulary.flag("remove_extra_whitespaces", True):
        steps += [normalizers.Strip(left=False), normalizers.Replace(Regex(" {2,}"), " ")]
    backend.normalizer = normalizers.Sequence(steps)
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace(SPACE_MARK)]
    )
    backend.decoder = decoders.Metaspace(SPACE_MARK)
    first, last = vocabulary.token_id("bos_token_id", 0), vocabulary.token_id("eos_token_id", 2)
    return _finish(backend, vocabulary, tokens, _special_ids(vocabulary), first, last, num_between=2)


def _special_ids(vocabulary: Vocabulary) -> set[int]:
    """Tokens with a role, and those that the file calls control tokens."""
    found = {index for role in _ROLES if (index := vocabulary.token_id(f"{role}_token_id")) is not None}
    found |= {index for index, kind in enumerate(vocabulary.types) if kind not in (NORMAL, USER_DEFINED, UNUSED)}
    return found


def _finish(
    backend: Backend,
    vocabulary: Vocabulary,
    tokens: Sequence[str],
    special: set[int],
    first: int | None,
    last: int | None,
    *,
    num_between: int,
) -> Tokenizer:
    """`num_between`: separators between two texts; one gives the second text its own type."""
    if first is None or last is None:
        raise ModelError(f"{vocabulary.where} does not name the first and last token of a text. Convert it again.")
    kinds = {index for index, kind in enumerate(vocabulary.types) if kind in (CONTROL, UNKNOWN)}
    backend.add_special_tokens(
        [AddedToken(tokens[index], special=True, normalized=False) for index in sorted(special | kinds)]
    )
    between = (last,) * num_between
    named = {
        f"{role.replace('seperator', 'sep').replace('unknown', 'unk').replace('padding', 'pad')}_token": role
        for role in _ROLES
    }
    roles = {name: vocabulary.token_id(f"{role}_token_id") for name, role in named.items()}
    return Tokenizer(
        backend,
        vocab_size=len(tokens),
        bos_token_id=first,
        end_token_ids=(last,),
        prefix_ids=(first,),
        suffix_ids=(last,),
        pair=PairTemplate((first,), between, (last,), has_types=num_between == 1),
        special_tokens={name: tokens[index] for name, index in roles.items() if index is not None},
    )
