"""Answers drawn at random within the masks conform to their schema, and end where it lets them."""

from __future__ import annotations

import json

import jsonschema
import numpy as np
import pytest
from text.conftest import EXTRA_LOGITS
from text.grammar.answers import accepts, allowed, draw_answer, of, spelled
from text.grammar.schemas import SCHEMAS, record
from text.small_vocabularies import small_byte_level

from millrace.errors import ModelError
from millrace.params.grammar import Grammar
from millrace.text.grammar.compiler import GrammarError
from millrace.text.grammar.environment import GrammarEnvironment
from millrace.text.grammar.masks import ALL_TOKENS, MaskAsk, MaskBatch
from millrace.text.tokenizers.tokenizer import Tokenizer

OBJECT = Grammar("json_object")


@pytest.mark.parametrize("name", SCHEMAS)
def test_random_answers_conform(environment: GrammarEnvironment, default_tokenizer: Tokenizer, name: str) -> None:
    schema = SCHEMAS[name][0]
    answers = [draw_answer(environment, of(schema), default_tokenizer, seed) for seed in range(4)]
    assert None not in answers
    for answer in answers:
        jsonschema.validate(json.loads(answer or ""), schema)


@pytest.mark.parametrize("end", [0, 1])
def test_any_end_token_ends_a_number(environment: GrammarEnvironment, default_tokenizer: Tokenizer, end: int) -> None:
    matcher = environment.compile(of({"type": "integer"})).matcher()
    matcher.consume([*default_tokenizer.encode("12", add_special=False), default_tokenizer.end_token_ids[end]])
    assert matcher.is_done


@pytest.mark.parametrize("name", SCHEMAS)
def test_values_are_accepted_or_not(environment: GrammarEnvironment, default_tokenizer: Tokenizer, name: str) -> None:
    schema, good, bad = SCHEMAS[name]
    jsonschema.validate(good, schema)
    assert accepts(environment, of(schema), default_tokenizer, spelled(good))
    assert not accepts(environment, of(schema), default_tokenizer, spelled(bad))


@pytest.mark.parametrize("text", ["{}", '{"a": [1, {"b": null}], "c": "é"}', '{"deep": {"er": [[[]]]}}'])
def test_any_object(environment: GrammarEnvironment, default_tokenizer: Tokenizer, text: str) -> None:
    assert accepts(environment, OBJECT, default_tokenizer, text)


@pytest.mark.parametrize("text", ["[1]", "3", '"x"', '{"a": 1', "{a: 1}", '{ "a": 1}', '{"a":\n\n1}', ' {"a": 1}', ""])
def test_what_is_no_object_or_freely_spaced(
    environment: GrammarEnvironment, default_tokenizer: Tokenizer, text: str
) -> None:
    assert not accepts(environment, OBJECT, default_tokenizer, text)


def test_end_tokens_are_allowed_exactly_where_the_grammar_may_end(
    environment: GrammarEnvironment, default_tokenizer: Tokenizer
) -> None:
    ends = set(default_tokenizer.end_token_ids)
    assert default_tokenizer.token_id("<|im_end|>") in ends
    matcher = environment.compile(OBJECT).matcher()
    for token in default_tokenizer.encode('{"a": 1}', add_special=False):
        assert not matcher.may_end
        assert not matcher.is_done
        assert not ends & set(allowed(matcher, environment.num_words).tolist())
        matcher.consume([token])
    assert matcher.may_end
    assert matcher.is_done
    assert set(allowed(matcher, environment.num_words).tolist()) == ends
    matcher.consume([default_tokenizer.end_token_ids[-1]])
    assert set(allowed(matcher, environment.num_words).tolist()) == ends


def test_a_number_may_end_or_go_on(environment: GrammarEnvironment, default_tokenizer: Tokenizer) -> None:
    matcher = environment.compile(of({"type": "integer"})).matcher()
    matcher.consume(default_tokenizer.encode("12", add_special=False))
    choices = set(allowed(matcher, environment.num_words).tolist())
    assert matcher.may_end
    assert not matcher.is_done
    assert set(default_tokenizer.end_token_ids) < choices


def test_other_special_tokens_are_never_allowed(environment: GrammarEnvironment, default_tokenizer: Tokenizer) -> None:
    """Inside a string their text would be fine, but decoding hides them."""
    matcher = environment.compile(of({"type": "string"})).matcher()
    matcher.consume(default_tokenizer.encode('"', add_special=False))
    choices = set(allowed(matcher, environment.num_words).tolist())
    assert len(choices) > 10_000
    assert not choices & default_tokenizer.special_ids


@pytest.mark.parametrize("extra", [-3, 0, 5])
def test_logits_beyond_the_vocabulary_are_not_allowed(
    environment: GrammarEnvironment, default_tokenizer: Tokenizer, extra: int
) -> None:
    assert environment.num_words == (default_tokenizer.vocab_size + EXTRA_LOGITS + 31) // 32
    matcher = environment.compile(of({"type": "string"})).matcher()
    matcher.consume(default_tokenizer.encode('"', add_special=False))
    row = np.full(environment.num_words + extra, 0xFFFFFFFF, np.uint32)
    matcher.fill_mask(row)
    whole = np.empty(environment.num_words, np.uint32)
    matcher.fill_mask(whole)
    shared = min(len(row), len(whole))
    assert np.array_equal(row[:shared], whole[:shared])
    bits = np.unpackbits(row.view(np.uint8), bitorder="little")
    assert not bits[default_tokenizer.vocab_size :].any()


def test_rows_are_filled_together_as_one_by_one(environment: GrammarEnvironment, default_tokenizer: Tokenizer) -> None:
    matchers = [environment.compile(of(schema)).matcher() for schema, _, _ in SCHEMAS.values()]
    for wider in (0, 3):
        together = np.full((len(matchers), environment.num_words + wider), 7, np.uint32)
        asks = [MaskAsk(matcher, row, ()) for row, matcher in enumerate(matchers)]
        assert environment.fill_masks(MaskBatch(asks), together) == [None] * len(matchers)
        for matcher, row in zip(matchers, together, strict=True):
            alone = np.empty_like(row)
            matcher.fill_mask(alone)
            assert np.array_equal(alone, row)


@pytest.mark.parametrize("wider", [0, 3])
def test_masks_of_drafts_are_those_after_the_drafts(
    environment: GrammarEnvironment, default_tokenizer: Tokenizer, wider: int
) -> None:
    compiled = environment.compile(of(record({"colour": {"enum": ["red", "green"]}, "n": {"type": "integer"}})))
    end = default_tokenizer.end_token_ids[0]
    texts = ['{"colour": "green", "n": 12}', '{"colour": "blue", "n": 1}', "", '{"colour": "red", "n": 1}']
    drafts = [default_tokenizer.encode(text, add_special=False) for text in texts]
    drafts[3] += [end, end]
    firsts = np.cumsum([0, *(1 + len(own) for own in drafts)]).tolist()
    asks = [MaskAsk(compiled.matcher(), first, own) for first, own in zip(firsts, drafts, strict=False)]
    out = np.full((firsts[-1], environment.num_words + wider), 7, np.uint32)
    assert environment.fill_masks(MaskBatch(asks), out) == [None] * 4
    for ask in asks:
        lone, row = compiled.matcher(), np.empty(environment.num_words + wider, np.uint32)
        for place, draft in enumerate((*ask.drafts, None)):
            lone.fill_mask(row)
            assert np.array_equal(row, out[ask.first + place])
            if draft is None or not row[draft // 32] >> np.uint32(draft % 32) & 1:
                assert (ask.rows(out)[place + 1 :] == ALL_TOKENS).all()
                break
            if draft == end:
                break
            lone.consume([draft])
        ask.matcher.consume(default_tokenizer.encode('{"colour": "green"', add_special=False))  # nothing was consumed


def test_drafts_are_cut_where_the_grammar_refuses_them(
    environment: GrammarEnvironment, default_tokenizer: Tokenizer
) -> None:
    def ids(text: str) -> list[int]:
        return default_tokenizer.encode(text, add_special=False)

    schema = {"type": "array", "items": {"enum": ["north-by-northwest", "south"]}, "maxItems": 2}
    matcher = environment.compile(of(schema)).matcher()
    start, rest = ids('["'), ids("north-by-northwest")
    matcher.consume(start[:1])
    behind, end = start[1:], default_tokenizer.end_token_ids[0]
    assert matcher.guided(behind, ids("east"), 4) == ([], False)
    assert matcher.guided(behind, rest[:1] + ids(" pole"), 4) == (rest[:1], False)
    forced, is_forced = matcher.guided(behind + rest[:1], ids(" pole"), 3)
    assert is_forced
    assert len(forced) == 3
    assert (
        default_tokenizer.decode(rest[:1] + forced)
        == "north-by-northwest"[: len(default_tokenizer.decode(rest[:1] + forced))]
    )
    assert matcher.guided(behind + rest[:1], [*forced, *ids("!!!!")], 7)[0][:3] == forced
    whole = ids('["south"]')
    assert matcher.guided(whole[1:], [end], 4) == ([], False)
    assert matcher.guided([9, *behind], ids("east"), 4) == ([], False)  # Not an answer at all.
    matcher.consume(behind)
    assert matcher.num_consumed == len(start)


def test_answers_move_to_new_lexers(environment: GrammarEnvironment, default_tokenizer: Tokenizer) -> None:
    compiled = environment.compile(OBJECT)
    begun = ['{"a": [1', "{", '{"b": "text', '{"c"']
    matchers = [compiled.matcher() for _ in begun]
    for matcher, text in zip(matchers, begun, strict=True):
        matcher.consume(default_tokenizer.encode(text, add_special=False))
    before = [allowed(matcher, environment.num_words).tolist() for matcher in matchers]
    assert compiled.is_crowded
    compiled.grow()
    compiled.spread()
    sizes = sorted(len(lexer.matchers) for lexer in {matcher.lexer for matcher in matchers})
    assert sizes == [2, 2]
    while compiled.is_crowded:
        compiled.grow()
        compiled.spread()
    assert len({matcher.lexer for matcher in matchers}) == 4, "one for each answer"
    assert [allowed(matcher, environment.num_words).tolist() for matcher in matchers] == before
    for matcher in matchers:
        matcher.release()
    assert all(not matcher.lexer.matchers for matcher in matchers)


def test_a_lexer_that_cannot_be_compiled_again_is_not_used(
    environment: GrammarEnvironment, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled = environment.compile(OBJECT)
    matchers = [compiled.matcher() for _ in range(2)]
    broken = environment.compile(OBJECT).first
    assert not broken.consume_token(0)
    # llguidance fails here only when memory is short, so the failure is put in its place.
    monkeypatch.setattr(compiled, "build", lambda: broken)
    compiled.grow()
    compiled.spread()
    assert not compiled.is_crowded
    assert compiled.matcher().lexer is matchers[0].lexer


def test_tokens_are_consumed_together_as_one_by_one(
    environment: GrammarEnvironment, default_tokenizer: Tokenizer
) -> None:
    compiled = environment.compile(of({"enum": [1, "a"]}))
    (one,), (quote,), (wrong,) = (default_tokenizer.encode(text, add_special=False) for text in ("1", '"', "x"))
    matchers = [compiled.matcher() for _ in range(4)]
    matchers[3].consume([one])
    end = default_tokenizer.end_token_ids[0]
    errors = environment.consume(matchers, [one, quote, wrong, end])
    assert [error is None for error in errors] == [True, True, False, True]
    assert matchers[0].is_done
    alone = compiled.matcher()
    alone.consume([quote])
    both = [allowed(matcher, environment.num_words).tolist() for matcher in (alone, matchers[1])]
    assert both[0] == both[1]


def test_an_error_concerns_its_matcher_only(environment: GrammarEnvironment, default_tokenizer: Tokenizer) -> None:
    compiled = environment.compile(OBJECT)
    wrong, right = compiled.matcher(), compiled.matcher()
    with pytest.raises(GrammarError, match="cannot be followed"):
        wrong.consume(default_tokenizer.encode("no", add_special=False))
    assert not wrong.is_done
    out = np.zeros((2, environment.num_words), np.uint32)
    first, second = environment.fill_masks(MaskBatch([MaskAsk(wrong, 0, ()), MaskAsk(right, 1, ())]), out)
    assert first is not None
    assert second is None
    assert out[1].any()
    right.consume(default_tokenizer.encode("{", add_special=False))


def test_a_schema_without_any_value_is_an_error(environment: GrammarEnvironment) -> None:
    with pytest.raises(GrammarError, match="allows no answer"):
        environment.compile(of({"$ref": "#"}))


def test_a_regular_expression_with_too_many_states_is_an_error(environment: GrammarEnvironment) -> None:
    source = "|".join(f".*{chr(97 + number % 26)}.{{{number}}}" for number in range(60))
    with pytest.raises(GrammarError, match="too complex"):
        environment.compile(Grammar("regex", source))


def test_a_sentence_piece_vocabulary(sentence_piece: Tokenizer) -> None:
    environment = GrammarEnvironment(sentence_piece, sentence_piece.vocab_size)
    schema = record({"a": {"enum": ["x y", "é"]}})
    answers = {draw_answer(environment, of(schema), sentence_piece, seed) for seed in range(8)}
    assert answers == {'{"a": "x y"}', '{"a": "é"}'}


def test_a_model_without_end_tokens_is_refused() -> None:
    tokenizer = small_byte_level()
    tokenizer.end_token_ids = ()
    with pytest.raises(ModelError, match="no end token"):
        GrammarEnvironment(tokenizer, tokenizer.vocab_size)


LONG = {"type": "array", "items": record({}), "minItems": 200}
"""Its answers are one long text that is forced."""


@pytest.mark.parametrize("schema", [*(entry[0] for entry in SCHEMAS.values()), LONG], ids=[*SCHEMAS, "long"])
@pytest.mark.parametrize("is_looking", [True, False], ids=["ahead", "not"])
def test_remembered_tokens_change_no_mask(environment: GrammarEnvironment, schema: object, is_looking: bool) -> None:
    """One matcher remembers what must come, the other one never does."""
    compiled, rng = environment.compile(of(schema)), np.random.default_rng(0)
    remembers, plain = compiled.matcher(), compiled.matcher()
    batch = MaskBatch([MaskAsk(remembers, 0, ()), MaskAsk(plain, 1, ())])
    masks, alone = np.empty((2, environment.num_words), np.uint32), np.empty(environment.num_words, np.uint32)
    num_known = 0
    for _ in range(60):
        plain.known.clear()
        assert environment.fill_masks(batch, masks) == [None, None]
        assert (masks[0] == masks[1]).all()
        num_known += bool(remembers.known)
        remembers.fill_mask(alone)
        assert (alone == masks[1]).all()
        tokens = np.flatnonzero(np.unpackbits(masks[0].view(np.uint8), bitorder="little"))
        if len(tokens) == 1 and is_looking:
            remembers.forced_tokens()
        token = int(rng.choice(tokens))
        remembers.consume([token])
        plain.consume([token])
        if plain.is_done:
            break
    assert num_known > 0 or not compiled.begins_with
    assert schema is not LONG or num_known > (50 if is_looking else 10)


def test_a_token_that_was_not_expected_ends_what_is_remembered(
    environment: GrammarEnvironment, default_tokenizer: Tokenizer
) -> None:
    """Other tokens may spell the same text."""
    matcher = environment.compile(of(record({"name": {"type": "integer"}}))).matcher()
    assert len(matcher.known) > 2
    matcher.consume([default_tokenizer.encode("{", add_special=False)[0]])
    assert not matcher.known
    rest = default_tokenizer.encode('"name": 3}', add_special=False)
    matcher.consume(rest)
    assert matcher.is_done


def test_rows_after_drafts_are_not_taken_from_what_is_remembered(environment: GrammarEnvironment) -> None:
    compiled = environment.compile(of(record({"name": {"type": "integer"}})))
    matcher, plain = compiled.matcher(), compiled.matcher()
    drafts = list(matcher.known)[:3]
    plain.known.clear()
    rows = np.empty((2, 1 + len(drafts), environment.num_words), np.uint32)
    matcher.fill_masks(rows[0], drafts)
    plain.fill_masks(rows[1], drafts)
    assert (rows[0] == rows[1]).all()
    assert list(matcher.known)[:3] == drafts
