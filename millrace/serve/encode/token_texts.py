"""Texts for models that compare token by token (ColBERT): markers, expanded queries, and which vectors count."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from millrace.errors import ContextOverflow
from millrace.link.vectors import Float32s, max_similarity
from millrace.serve.generate.generation import Prompt
from millrace.serve.generate.vectors import check_num_inputs, encode_inputs, text_room
from millrace.serve.state import FrontState
from millrace.sources.encoders.encoder_files import Prompts
from millrace.sources.encoders.retrieval_files import MultiForm, Role
from millrace.text.tokenizers.tokenizer import Tokenizer


def known_prompt(prompts: object, *names: str) -> str | None:
    """The first of these names that the model has a prompt for."""
    return next((name for name in names if isinstance(prompts, dict) and name in prompts), None)


@dataclass(frozen=True, slots=True)
class TokenText:
    token_ids: list[int]
    attended: int
    """As in `DrawParams`."""
    num_dropped: int


@dataclass(frozen=True, slots=True)
class TokenTexts:
    form: MultiForm
    tokenizer: Tokenizer

    def text(self, token_ids: list[int], role: Role, room: int, field: str, *, may_cut: bool) -> TokenText:
        """Of an encoded text, special tokens included. `room`: tokens that the model reads; `field`: the request's name
        of the text."""
        num_before = len(self.tokenizer.prefix_ids)
        marked = [*token_ids[:num_before], *self._marker(role), *token_ids[num_before:]]
        expansion = self.form.expansion if role == "query" else None
        own = self.form.query_tokens if role == "query" else self.form.document_tokens
        if expansion is not None and expansion.is_fixed:
            own = expansion.length
        limit = min(room, own or room)
        kept = self.tokenizer.cut(marked, limit)
        if len(marked) > limit and not may_cut:
            what = "queries" if role == "query" else "documents"
            raise ContextOverflow(
                f"The {role} has {len(marked)} tokens, special tokens included, but this model reads {what} of at most"
                f" {limit}. Shorten it, or ask for its end to be cut (`truncate`).",
                param=field,
            )
        if expansion is None or len(kept) >= expansion.length:
            return TokenText(kept, 0, len(marked) - len(kept))
        filled = [*kept, *[self._filler(expansion.token)] * (min(expansion.length, room) - len(kept))]
        return TokenText(filled, 0 if expansion.is_attended else len(kept), len(marked) - len(kept))

    def kept(self, packed: Float32s, token_ids: Sequence[int], role: Role) -> Float32s:
        """Vectors [tokens, width] of the tokens that are compared."""
        vectors = packed.reshape(len(token_ids), -1)
        if role not in self.form.skips_in:
            return vectors
        found = (self.tokenizer.token_id(word) for word in self.form.skipped_words)
        skipped = frozenset(token_id for token_id in found if token_id is not None)
        unknown = self.tokenizer.token_id(self.tokenizer.special_tokens.get("unk_token", ""))
        skipped -= {unknown} if unknown is not None else set()
        return vectors[[token_id not in skipped for token_id in token_ids]]

    def similarity(self, query: Float32s, document: Float32s) -> float:
        return max_similarity(query, document, takes_mean=self.form.takes_mean)

    def _marker(self, role: Role) -> list[int]:
        """One token if the vocabulary has it, else its text's tokens."""
        text = self.form.markers.get(role, "")
        for name in (text, *text.split(None, 1)[:1]):
            token_id = self.tokenizer.token_id(name) if name else None
            if token_id is not None:
                return [token_id, *self.tokenizer.encode(text[len(name) :].strip(), add_special=False)]
        return self.tokenizer.encode(text, add_special=False) if text else []

    def _filler(self, token: str) -> int:
        special = self.tokenizer.special_tokens
        found = self.tokenizer.token_id(token or special.get("mask_token", ""))
        if found is not None:
            return found
        if self.tokenizer.end_token_ids:
            return self.tokenizer.end_token_ids[0]
        raise ContextOverflow("This model fills queries with a mask token, but its tokenizer has none.", param="query")


def prompt_before(prompts: Prompts, role: Role) -> str:
    return prompts.text(known_prompt(prompts.by_name, *(("query",) if role == "query" else _DOCUMENT_PROMPTS)))


_DOCUMENT_PROMPTS = ("document", "passage", "corpus")


async def role_inputs(
    state: FrontState, form: MultiForm, texts: list[str], field: str, role: Role, *, may_cut: bool
) -> list[Prompt]:
    check_num_inputs(texts, field)
    prompts = None if state.encoder is None else state.encoder.prompts
    before = "" if prompts is None else prompt_before(prompts, role)
    encoded = await encode_inputs(state, [before + text for text in texts], field, may_cut=may_cut)
    forms, room = TokenTexts(form, state.tokenizer), text_room(state)
    found = [forms.text(token_ids, role, room, field, may_cut=may_cut) for token_ids in encoded]
    return [Prompt(one.token_ids, None, one.num_dropped, attended=one.attended) for one in found]
