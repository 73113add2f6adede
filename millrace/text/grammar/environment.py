"""What llguidance knows of the model: its tokens, their bytes, and the tokens that end an answer."""

from __future__ import annotations

import json
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from llguidance import LLExecutor, LLMatcher, LLTokenizer

from millrace.errors import ModelError
from millrace.params.grammar import Grammar
from millrace.sources.resolve import ModelFiles
from millrace.text.grammar.compiled import CompiledGrammar
from millrace.text.grammar.compiler import GrammarError
from millrace.text.grammar.masks import ALL_TOKENS, MaskBatch, Uint32s
from millrace.text.grammar.matcher import Matcher, allow_only
from millrace.text.grammar.problems import sentence_of
from millrace.text.grammar.translate import guidance_source, limits, starting_after
from millrace.text.tokenizers.load import load_tokenizer
from millrace.text.tokenizers.tokenizer import Tokenizer

Int64s = npt.NDArray[np.int64]

NUM_PROBES = 3
LEXERS_PER_THREAD = 4
"""Masks differ in their time, and those of one lexer follow each other: with few rows for each, threads end alike."""


class GrammarEnvironment:
    """Takes about half a second to build for a vocabulary of 50,000 tokens. Immutable and thread-safe."""

    def __init__(self, tokenizer: Tokenizer, num_logits: int, num_threads: int = 1) -> None:
        """`num_logits` is the width of the model's logits; ids without a token are never allowed."""
        num_ids = max(tokenizer.vocab_size, num_logits)
        ends = tuple(token_id for token_id in tokenizer.end_token_ids if token_id < num_ids)
        if not ends:
            raise ModelError("The model has no end token, so an answer in a grammar could not end.")
        try:
            self.tokens = LLTokenizer(
                _with_markers(tokenizer), n_vocab=num_ids, eos_token=list(ends), slices=LLTokenizer.json_slices()
            )
        except ValueError as error:
            raise ModelError(f"Grammars are not supported with this model's tokenizer: {error}.") from error
        self._end_token_ids = ends
        self._end_set = frozenset(ends)
        self._end_words = np.array(ends) // 32
        self._end_bits = np.uint32(1) << np.array(ends, np.uint32) % np.uint32(32)
        self.num_words = (num_ids + 31) // 32
        """32-bit words in a mask over all ids."""
        self._max_lexers = LEXERS_PER_THREAD * num_threads if num_threads > 1 else 1
        self._threads = LLExecutor(num_threads)

    def compile(self, grammar: Grammar) -> CompiledGrammar:
        source = guidance_source(grammar)
        if grammar.after:
            source = starting_after(source, grammar.after)

        def build() -> LLMatcher:
            return LLMatcher(self.tokens, source, log_level=0, limits=limits())

        compiled = CompiledGrammar(build, self.num_words, self._end_token_ids, self._max_lexers)
        if compiled.first.is_error():
            raise GrammarError(sentence_of(compiled.first.get_error(), grammar.noun))
        probe = compiled.matcher()
        self._probe(probe, grammar.noun)
        probe.release()
        beginning = compiled.matcher()
        compiled.begins_with = beginning.forced_tokens()
        beginning.release()
        return compiled

    def _probe(self, matcher: Matcher, noun: str) -> None:
        """Follow an answer's first tokens: some limits show only there."""
        row = np.empty(self.num_words, np.uint32)
        for _ in range(NUM_PROBES):
            try:
                matcher.fill_mask(row)
                tokens = np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little"))
                if tokens[0] in self._end_token_ids and len(tokens) <= len(self._end_token_ids):
                    return
                matcher.consume([int(tokens[-1])])
            except GrammarError as error:
                if "NoExtension" in str(error) or not row.any():
                    raise GrammarError(f"The {noun} allows no answer at all.") from None
                raise GrammarError(f"The {noun} is too complex: {error}") from None

    def fill_masks(self, batch: MaskBatch, out: Uint32s) -> list[GrammarError | None]:
        """Fill the rows of `out` that are asked for, in parallel threads. An error leaves its rows undefined."""
        if out.shape[1] != self.num_words or not out.flags.c_contiguous:
            return [ask.fill(out) for ask in batch.asks]
        memory = (out.ctypes.data, out.strides[0], len(out))
        known = [ask for ask in batch.plain if ask.matcher.known]
        if len(known) < len(batch.plain):
            self._threads.unsafe_compute_mask_ptr(batch.unknown(), *memory)
        for ask in known:
            allow_only(out[ask.first], ask.matcher.known[0])
        if batch.drafted:
            for ask in batch.asks:
                ask.rows(out)[1:] = ALL_TOKENS  # Rows after a refused draft are not written.
            self._threads.unsafe_compute_mask_ptr_with_draft_token(batch.drafted, *memory)
        # A mask without a token is an error to llguidance.
        return [matcher.error(True) if matcher.inner.is_error() else None for matcher in batch.matchers]

    def withhold_ends(self, out: Uint32s, rows: Int64s) -> None:
        """Remove end tokens from these rows of masks, but not from those that allow nothing else."""
        may_end = (out[rows][:, self._end_words] & self._end_bits).any(axis=1)
        rows = rows[may_end]
        without = out[rows]
        for word, bits in zip(self._end_words, self._end_bits, strict=True):
            without[:, word] &= ~bits
        goes_on = without.any(axis=1)
        out[rows[goes_on]] = without[goes_on]

    def consume(self, matchers: Sequence[Matcher], tokens: Sequence[int]) -> list[GrammarError | None]:
        """Advance matcher i, each of which occurs once, by token i, in parallel threads."""
        errors: list[GrammarError | None] = [None] * len(matchers)
        due: Sequence[int] = range(len(matchers))
        if not self._end_set.isdisjoint(tokens):
            due = [index for index in due if not matchers[index].ends(tokens[index])]
            if not due:
                return errors
        done = self._threads.consume_token_par([(matchers[index].inner, tokens[index]) for index in due])
        for index, is_consumed in zip(due, done, strict=True):
            if is_consumed:
                matchers[index].note(tokens[index])
            else:
                errors[index] = GrammarError(matchers[index].problem)
        return errors


def _with_markers(tokenizer: Tokenizer) -> str:
    """The tokenizer's JSON, in which markers are special. llguidance would take some of them for text, so that an end
    token inside a string would cut the answer and a hidden one be missing in it. And it would write others in forced
    text, where it allows none."""
    text = tokenizer.to_json()
    fields = json.loads(text)
    added = {token["id"]: token for token in fields["added_tokens"]}
    missing = {index for index in tokenizer.marker_ids if index not in added or not added[index]["special"]}
    if not missing:
        return text
    usual = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    for index, content in tokenizer.tokens().items():
        if index in missing:
            added[index] = {"id": index, "content": content, **usual, **added.get(index, {}), "special": True}
    return json.dumps({**fields, "added_tokens": [added[index] for index in sorted(added)]})


def load_environment(files: ModelFiles, num_logits: int, num_threads: int) -> GrammarEnvironment:
    return GrammarEnvironment(load_tokenizer(files), num_logits, num_threads)
