"""Stand-in tokenizer for models with random weights that have none, so that they can be served over HTTP.

Ids 0 to 255 are UTF-8 bytes. Higher ids decode to their number, so that every generated token has visible text; no text
encodes to them. If the vocabulary has fewer than 256 ids, bytes without an id become the last id.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tokenizers import Tokenizer as Backend
from tokenizers import decoders, pre_tokenizers
from tokenizers.models import BPE

from millrace.errors import ModelError
from millrace.text.tokenizers.hf_tokenizer import ids_in
from millrace.text.tokenizers.token_table import CHAR_OF_BYTE
from millrace.text.tokenizers.tokenizer import Tokenizer

NUM_BYTES = 256
_SPACE = CHAR_OF_BYTE[ord(" ")]


def build_stand_in(config: Mapping[str, Any]) -> Tokenizer:
    """`config` is the model's config.json: the size of the vocabulary and the BOS and EOS ids."""
    vocab_size = config.get("vocab_size")
    if not isinstance(vocab_size, int) or isinstance(vocab_size, bool) or vocab_size < 1:
        raise ModelError(f"config.json: vocab_size is {vocab_size!r}; it must be a whole number above 0.")
    ids = {CHAR_OF_BYTE[byte]: byte for byte in range(min(NUM_BYTES, vocab_size))}
    ids |= {f"{_SPACE}{index}": index for index in range(NUM_BYTES, vocab_size)}
    backend = Backend(BPE(vocab=ids, merges=[], unk_token=CHAR_OF_BYTE[min(NUM_BYTES, vocab_size) - 1]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    ends = tuple(index for index in ids_in(config.get("eos_token_id")) if index < vocab_size)
    bos = next(iter(ids_in(config.get("bos_token_id"))), None)
    return Tokenizer(backend, vocab_size=vocab_size, bos_token_id=bos, end_token_ids=ends)
