"""Metadata of small GGUF vocabularies, complete in every kind of token."""

from __future__ import annotations

from typing import Any

from millrace.text.tokenizers.gguf_tokenizer import build_gguf_tokenizer
from millrace.text.tokenizers.token_table import CHAR_OF_BYTE
from millrace.text.tokenizers.tokenizer import Tokenizer

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6

Entry = tuple[str, int, float]


def metadata_of(model: str, entries: list[Entry], **keys: Any) -> dict[str, Any]:
    """Entries are (token, type, score). `keys` are keys of tokenizer.ggml, and `architecture`."""
    found: dict[str, Any] = {
        "general.architecture": keys.pop("architecture", "llama"),
        "tokenizer.ggml.model": model,
        "tokenizer.ggml.tokens": [token for token, _, _ in entries],
        "tokenizer.ggml.token_type": [kind for _, kind, _ in entries],
        "tokenizer.ggml.scores": [score for _, _, score in entries],
    }
    return found | {f"tokenizer.ggml.{key}": value for key, value in keys.items()}


def byte_level_metadata(pre: str = "gpt-2", **keys: Any) -> dict[str, Any]:
    """Every byte, a few merges, control and user-defined tokens, and two rows of padding."""
    merges = [
        "h e",
        "l l",
        "he ll",
        "hell o",
        "Ġ w",
        "o r",
        "Ġw or",
        "l d",
        "Ġwor ld",
        "Ġ Ġ",
        "Ã ©",
        "ð Ł",
        "1 2",
        "Ċ Ċ",
    ]
    words = ["".join(merge.split(" ")) for merge in merges]
    entries: list[Entry] = [("<|end|>", CONTROL, 0.0), ("<|im_end|>", CONTROL, 0.0), ("<call>", USER_DEFINED, 0.0)]
    entries += [(CHAR_OF_BYTE[byte], NORMAL, 0.0) for byte in range(256)]
    entries += [(word, NORMAL, 0.0) for word in words]
    entries += [("<｜a b｜>", CONTROL, 0.0)]
    entries += [(f"[PAD{index}]", UNUSED, 0.0) for index in range(len(entries), len(entries) + 2)]
    found = metadata_of("gpt2", entries, pre=pre, merges=merges, bos_token_id=0, eos_token_id=0) | {
        f"tokenizer.ggml.{key}": value for key, value in keys.items()
    }
    del found["tokenizer.ggml.scores"]
    return found


def sentence_piece_entries() -> list[Entry]:
    words = ["▁t", "he", "▁the", "▁▁", "▁▁▁▁", "in", "▁c", "at", "▁cat", "▁in", "é", "▁é", "中文"]
    chars = sorted({char for word in words for char in word} | set("abcdehint,.!<>0x"))
    entries: list[Entry] = [("<unk>", UNKNOWN, 0.0), ("<s>", CONTROL, 0.0), ("</s>", CONTROL, 0.0)]
    entries += [(f"<0x{byte:02X}>", BYTE, 0.0) for byte in range(256)]
    entries += [(word, NORMAL, -1.0 - place) for place, word in enumerate(words)]
    entries += [(char, NORMAL, -100.0 - place) for place, char in enumerate(chars) if char not in words]
    return [*entries, ("<tool>", USER_DEFINED, -1000.0), ("<end_of_turn>", CONTROL, -1000.0)]


def sentence_piece_metadata(**keys: Any) -> dict[str, Any]:
    given: dict[str, Any] = {"bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0} | keys
    return metadata_of("llama", sentence_piece_entries(), **given)


def small_byte_level(**keys: Any) -> Tokenizer:
    return build_gguf_tokenizer(byte_level_metadata(**keys), "small.gguf")


def small_sentence_piece(**keys: Any) -> Tokenizer:
    return build_gguf_tokenizer(sentence_piece_metadata(**keys), "small.gguf")
