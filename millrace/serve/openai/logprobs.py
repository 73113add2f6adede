"""Log-probabilities in the shapes of OpenAI's completions and of prompts."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence

from millrace.link.messages import TokenLogprobs
from millrace.serve.generate.logprobs import finite
from millrace.serve.openai.answers import CompletionLogprobs, PromptLogprob, PromptLogprobs
from millrace.text.tokenizers.tokenizer import Tokenizer


def prompt_logprobs(
    tokenizer: Tokenizer, token_ids: Sequence[int], entries: Sequence[TokenLogprobs | None]
) -> PromptLogprobs:
    """Per position: the prompt's token and the likeliest tokens, by token id."""
    return [None if entry is None else _by_token_id(tokenizer, entry) for entry in entries[: len(token_ids)]]


def _by_token_id(tokenizer: Tokenizer, entry: TokenLogprobs) -> dict[str, PromptLogprob]:
    found = {
        str(token_id): PromptLogprob(finite(logprob), rank, tokenizer.token_text(token_id))
        for rank, (token_id, logprob) in enumerate(zip(entry.top_ids, entry.top_logprobs, strict=True), 1)
    }
    own = PromptLogprob(finite(entry.logprob), entry.rank, tokenizer.token_text(entry.token_id))
    return {str(entry.token_id): own, **{key: value for key, value in found.items() if key != str(entry.token_id)}}


class CompletionLogprobsWriter:
    """Builds the columns of completions chunk by chunk, with each token's offset in the text."""

    def __init__(self, tokenizer: Tokenizer, num_top: int, *, skip_special: bool) -> None:
        self._tokenizer = tokenizer
        self._num_top = num_top
        self._hidden = tokenizer.special_ids if skip_special else frozenset[int]()
        self._offset = 0
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def echoed(self, token_ids: Sequence[int], entries: Sequence[TokenLogprobs | None]) -> CompletionLogprobs:
        """The columns of an echoed prompt, whose first token has no log-probability."""
        columns = CompletionLogprobs([], [], [], [])
        for token_id, entry in zip(token_ids, entries, strict=False):
            self._add(columns, token_id, entry)
        return columns

    def generated(self, entries: Iterable[TokenLogprobs]) -> CompletionLogprobs:
        columns = CompletionLogprobs([], [], [], [])
        for entry in entries:
            self._add(columns, entry.token_id, entry)
        return columns

    def _add(self, columns: CompletionLogprobs, token_id: int, entry: TokenLogprobs | None) -> None:
        text = self._name(token_id)
        columns.tokens.append(text)
        columns.text_offset.append(self._offset)
        columns.token_logprobs.append(None if entry is None else finite(entry.logprob))
        columns.top_logprobs.append(None if entry is None else self._top(entry, text))
        if token_id not in self._hidden:
            # A character can span tokens; it counts at the token that completes it.
            self._offset += len(self._utf8.decode(self._tokenizer.token_bytes(token_id)))

    def _top(self, entry: TokenLogprobs, own_text: str) -> dict[str, float]:
        """By text; of tokens with the same text the likeliest counts. The chosen token is always included."""
        top: dict[str, float] = {}
        for token_id, logprob in zip(entry.top_ids[: self._num_top], entry.top_logprobs[: self._num_top], strict=True):
            top.setdefault(self._name(token_id), finite(logprob))
        top.setdefault(own_text, finite(entry.logprob))
        return top

    def _name(self, token_id: int) -> str:
        """A token's text. A token that is only part of a character has none, so its bytes are written out, as OpenAI
        does; otherwise all such tokens would have the same name."""
        text = self._tokenizer.token_text(token_id)
        if "\ufffd" not in text:
            return text
        data = self._tokenizer.token_bytes(token_id)
        return text if text.encode() == data else "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def joined(first: CompletionLogprobs, second: CompletionLogprobs) -> CompletionLogprobs:
    return CompletionLogprobs(
        first.text_offset + second.text_offset,
        first.token_logprobs + second.token_logprobs,
        first.tokens + second.tokens,
        first.top_logprobs + second.top_logprobs,
    )
