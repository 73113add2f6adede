"""What `LLM` does with an encoder, or with a model that was trained to embed: vectors, scores of pairs, classes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from millrace.errors import BadRequest
from millrace.link.client import EngineClient
from millrace.link.vectors import Float32s, SparseVector, VectorRequest, sparse_of
from millrace.params.draws import Pooling
from millrace.serve.encode.pairs import (
    Compare,
    activated,
    compare_cosine,
    compare_sparse,
    compare_tokens,
    fitted,
)
from millrace.serve.encode.token_texts import TokenTexts, known_prompt, prompt_before
from millrace.sources.encoders.encoder_files import EncoderFiles
from millrace.sources.encoders.retrieval_files import Role
from millrace.text.tokenizers.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class TokenClass:
    token_id: int
    token: str
    label: str
    score: float


@dataclass(frozen=True, slots=True)
class Classification:
    """The classes of one text."""

    label: str
    """The likeliest; of a model that classifies tokens, ""."""
    scores: dict[str, float] = field(default_factory=dict)
    """By label, from 0 to 1."""
    tokens: list[TokenClass] = field(default_factory=list)
    """Of a model that classifies tokens: all tokens of the text, special ones included."""


@dataclass(frozen=True, slots=True)
class Input:
    """Tokens that are computed together."""

    token_ids: list[int]
    second_from: int = 0
    pooled_from: int = 0
    attended: int = 0


@dataclass(frozen=True, slots=True)
class EncoderCalls:
    files: EncoderFiles
    client: EngineClient
    tokenizer: Tokenizer
    max_tokens: int

    def text_inputs(self, texts: Sequence[str], prompt_name: str | None, truncate: bool) -> list[Input]:
        """All texts are tokenised in parallel."""
        prompts = self.files.prompts
        if prompt_name is not None and prompt_name not in prompts.by_name:
            known = ", ".join(map(repr, prompts.by_name)) or "none"
            raise BadRequest(f"The model has no prompt {prompt_name!r}; it has {known}.", param="prompt_name")
        before, cut, skipped = prompts.text(prompt_name), self.tokenizer.cut, 0
        if before and not prompts.are_pooled:
            skipped = len(self.tokenizer.encode(self._cased(before))) - len(self.tokenizer.suffix_ids)
        tokenised = self.tokenizer.encode_batch([self._cased(before + text) for text in texts])
        return [Input(cut(ids, self.max_tokens) if truncate else ids, pooled_from=skipped) for ids in tokenised]

    def token_input(self, text: str, role: Role, truncate: bool) -> Input:
        """Of a model that compares token by token."""
        token_ids = self.tokenizer.encode(self._cased(prompt_before(self.files.prompts, role) + text))
        found = self._token_texts.text(token_ids, role, self.max_tokens, role, may_cut=truncate)
        return Input(found.token_ids, attended=found.attended)

    @property
    def _token_texts(self) -> TokenTexts:
        assert self.files.multi is not None
        return TokenTexts(self.files.multi, self.tokenizer)

    async def token_vectors(self, texts: Sequence[str], role: Role, truncate: bool) -> list[Float32s]:
        inputs, kept = [self.token_input(text, role, truncate) for text in texts], self._token_texts.kept
        packed = await self.vectors(inputs, "model")
        return [kept(own, one.token_ids, role) for own, one in zip(packed, inputs, strict=True)]

    async def sparse_vectors(
        self, texts: Sequence[str], prompt_name: str | None, max_weights: int | None, truncate: bool
    ) -> list[SparseVector]:
        inputs = self.text_inputs(texts, prompt_name, truncate)
        return [sparse_of(packed).largest(max_weights) for packed in await self.vectors(inputs, "model")]

    def pair_inputs(self, query: str, texts: Sequence[str], truncate: bool) -> list[Input]:
        """Of a cross-encoder."""
        if self.files.pair is not None:
            return self.text_inputs([self.files.pair.joined(query, text) for text in texts], None, truncate)
        template = self.tokenizer.pair
        first, *others = self.tokenizer.encode_batch([self._cased(text) for text in (query, *texts)], add_special=False)
        inputs = []
        for second in others:
            both = fitted(first, second, self.max_tokens - template.num_added) if truncate else (first, second)
            inputs.append(Input(*template.join(*both)))
        return inputs

    async def vectors(self, inputs: Sequence[Input], pooling: Pooling) -> list[Float32s]:
        requests: list[VectorRequest] = []
        try:
            for one in inputs:
                pair, prompt, seen = one.second_from, one.pooled_from, one.attended
                requests.append(
                    VectorRequest(
                        self.client, one.token_ids, pooling, second_from=pair, pooled_from=prompt, attended=seen
                    )
                )
            return [(await request.done).vector for request in requests]
        finally:
            for request in requests:
                request.cancel()

    async def pair_scores(self, query: str, texts: Sequence[str], pooling: Pooling, truncate: bool) -> list[float]:
        files = self.files
        if files.ranks:
            logits = await self.vectors(self.pair_inputs(query, texts, truncate), "model")
            label = 0 if files.pair is None else files.pair.label
            return [float(activated(one, files.activation)[label]) for one in logits]
        if files.task in ("classify", "tag"):
            raise BadRequest(
                f"This model has {len(files.labels)} classes; scores of pairs need a cross-encoder (one logit) or a"
                " model for embeddings."
            )
        inputs, compare = self._compared_inputs(query, texts, truncate)
        vectors = await self.vectors(inputs, pooling)
        first, *others = [(vector, one.token_ids) for vector, one in zip(vectors, inputs, strict=True)]
        return [compare(first, other) for other in others]

    def _compared_inputs(self, query: str, texts: Sequence[str], truncate: bool) -> tuple[list[Input], Compare]:
        files = self.files
        if files.multi is not None:
            documents = [self.token_input(text, "document", truncate) for text in texts]
            compare = compare_tokens(files.multi, self.tokenizer)
            return [self.token_input(query, "query", truncate), *documents], compare
        names = files.prompts.by_name
        [first] = self.text_inputs([query], known_prompt(names, "query"), truncate)
        name = known_prompt(names, "document", "passage", "corpus")
        inputs = [first, *self.text_inputs(texts, name, truncate)]
        return inputs, compare_sparse if files.task == "sparse" else compare_cosine

    async def classify(self, texts: Sequence[str], truncate: bool) -> list[Classification]:
        inputs = self.text_inputs(texts, None, truncate)
        logits = await self.vectors(inputs, "model")
        return [self._classes(one, given) for one, given in zip(logits, inputs, strict=True)]

    def _classes(self, logits: Float32s, given: Input) -> Classification:
        labels = self.files.labels
        scores = activated(logits.reshape(-1, len(labels)), self.files.activation)
        best = scores.argmax(axis=-1).tolist()
        if self.files.task == "classify":
            return Classification(labels[best[0]], dict(zip(labels, scores[0].tolist(), strict=True)))
        text_of = self.tokenizer.token_text
        tokens = [
            TokenClass(token_id, text_of(token_id), labels[label], float(own[label]))
            for token_id, label, own in zip(given.token_ids, best, scores, strict=True)
        ]
        return Classification("", tokens=tokens)

    def _cased(self, text: str) -> str:
        return text.lower() if self.files.lower_case else text
