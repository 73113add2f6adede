"""Tokenizers of Hugging Face directories equal those of transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from helpers.tiny_encoders import write_tokenizer
from text import corpus
from text.small_vocabularies import sentence_piece_entries
from tokenizers import AddedToken, decoders, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer

from millrace.errors import ModelError
from millrace.sources.resolve import ModelFiles
from millrace.text.chat.template import load_chat_template
from millrace.text.detokenizer import Detokenizer
from millrace.text.tokenizers.hf_tokenizer import build_hf_tokenizer
from millrace.text.tokenizers.load import load_tokenizer
from millrace.text.tokenizers.spm_merges import derive_merges
from millrace.text.tokenizers.tokenizer import Tokenizer


def trained() -> Backend:
    backend = Backend(BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = BpeTrainer(
        vocab_size=700,
        special_tokens=["<|start|>", "<|stop|>", "<|pad|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator([*corpus.SENTENCES, corpus.CODE], trainer)
    return backend


def write(directory: Path, backend: Backend, **files: Any) -> ModelFiles:
    """Keyword names are file names without `.json`."""
    backend.save(str(directory / "tokenizer.json"))
    for name, content in files.items():
        (directory / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")
    return ModelFiles("mine", "safetensors", directory, files.get("config", {}), ())


def transformers_tokenizer(directory: Path) -> Any:
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast.from_pretrained(str(directory))


def agree(ours: Tokenizer, theirs: Any, texts: list[str]) -> None:
    for text in texts:
        ids = ours.encode(text)
        assert ids == theirs.encode(text), text[:80]
        for skip in (True, False):
            decoded = theirs.decode(ids, skip_special_tokens=skip)
            assert ours.decode(ids, skip_special=skip) == decoded
            stream = Detokenizer(ours, skip_special=skip)
            assert "".join(map(stream.push, ids)) + stream.flush() == decoded


NAMED = {"bos_token": "<|start|>", "eos_token": "<|stop|>", "pad_token": "<|pad|>"}


def test_a_byte_level_directory(tmp_path: Path) -> None:
    files = write(tmp_path, trained(), tokenizer_config=NAMED)
    ours = load_tokenizer(files)
    agree(ours, transformers_tokenizer(tmp_path), [*corpus.pieces(), *corpus.with_tokens(list(NAMED.values()))])
    assert ours.bos_token_id == 0
    assert ours.end_token_ids == (1,)
    assert ours.special_ids == {0, 1, 2}
    assert ours.special_tokens == NAMED
    assert ours.vocab_size == 700


def test_the_template_of_the_post_processor_is_honoured(tmp_path: Path) -> None:
    backend = trained()
    backend.post_processor = processors.TemplateProcessing(
        "<|start|> $A <|stop|>", None, [("<|start|>", 0), ("<|stop|>", 1)]
    )
    ours = load_tokenizer(write(tmp_path, backend, tokenizer_config=NAMED))
    agree(ours, transformers_tokenizer(tmp_path), ["", "Hello world", "a<|stop|>"])
    assert ours.encode("Hello")[0] == 0
    assert ours.encode("Hello")[-1] == 1
    assert ours.encode("Hello", add_special=False) == ours.encode("Hello")[1:-1]


def test_flags_override_for_llama_classes(tmp_path: Path) -> None:
    settings = NAMED | {"tokenizer_class": "LlamaTokenizerFast", "add_bos_token": True, "add_eos_token": False}
    with_bos = load_tokenizer(write(tmp_path, trained(), tokenizer_config=settings))
    assert with_bos.encode("Hello") == [0, *with_bos.encode("Hello", add_special=False)]
    without = load_tokenizer(write(tmp_path, trained(), tokenizer_config=settings | {"add_bos_token": False}))
    assert without.encode("Hello") == with_bos.encode("Hello", add_special=False)


def test_tokens_only_in_tokenizer_config(tmp_path: Path) -> None:
    added = {
        "700": {"content": "<tool>", "special": False, "normalized": False},
        "701": {"content": "<|end of turn|>", "special": True, "lstrip": True},
    }
    files = write(tmp_path, trained(), tokenizer_config=NAMED | {"added_tokens_decoder": added})
    ours = load_tokenizer(files)
    agree(ours, transformers_tokenizer(tmp_path), corpus.with_tokens(["<tool>", "<|end of turn|>", "<|stop|>"]))
    assert ours.encode("<tool>") == [700]
    assert ours.special_ids == {0, 1, 2, 701}
    assert ours.vocab_size == 702


def test_a_token_under_another_id_is_refused(tmp_path: Path) -> None:
    added = {"900": {"content": "<tool>", "special": False}}
    files = write(tmp_path, trained(), tokenizer_config={"added_tokens_decoder": added})
    with pytest.raises(ModelError, match="gives the token '<tool>' the id 900, but tokenizer.json gives it 700"):
        load_tokenizer(files)


def test_special_tokens_from_the_old_file(tmp_path: Path) -> None:
    backend = trained()
    backend.add_tokens([AddedToken("<turn>", special=False)])
    written = {"eos_token": {"content": "<turn>", "lstrip": False}, "additional_special_tokens": ["<|pad|>"]}
    ours = load_tokenizer(write(tmp_path, backend, special_tokens_map=written))
    assert ours.end_token_ids == (700,)
    assert 700 in ours.special_ids
    assert ours.decode(ours.encode("a<turn>b")) == "ab"
    assert ours.special_tokens == {"eos_token": "<turn>"}


@pytest.mark.parametrize(
    ("generation", "config", "ends"),
    [
        ({"eos_token_id": [1, 7]}, {}, (1, 7)),
        ({"eos_token_id": 5}, {"eos_token_id": [6, 5]}, (1, 5, 6)),
        ({}, {"eos_token_id": None}, (1,)),
    ],
)
def test_every_file_can_list_end_tokens(tmp_path: Path, generation: Any, config: Any, ends: tuple[int, ...]) -> None:
    files = write(tmp_path, trained(), tokenizer_config=NAMED, generation_config=generation, config=config)
    assert load_tokenizer(files).end_token_ids == ends


def test_end_tokens_are_found_by_name_if_no_file_lists_them(tmp_path: Path) -> None:
    backend = trained()
    backend.add_special_tokens(["<|im_end|>"])
    backend.add_tokens([AddedToken("<|eot_id|>", special=False)])
    assert load_tokenizer(write(tmp_path, backend)).end_token_ids == (700,)
    assert load_tokenizer(write(tmp_path, backend, tokenizer_config=NAMED)).end_token_ids == (1, 700)
    listed = {"eos_token_id": [1]}
    files = write(tmp_path, backend, tokenizer_config=NAMED, generation_config=listed)
    assert load_tokenizer(files).end_token_ids == (1,)


def test_a_sentence_piece_directory(tmp_path: Path) -> None:
    entries = sentence_piece_entries()
    ids = {token: index for index, (token, _, _) in enumerate(entries)}
    merges = derive_merges(ids, [score for _, _, score in entries])
    backend = Backend(BPE(vocab=ids, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    backend.post_processor = processors.TemplateProcessing("<s> $A", None, [("<s>", 1)])
    ours = load_tokenizer(write(tmp_path, backend, tokenizer_config={"bos_token": "<s>", "eos_token": "</s>"}))
    agree(ours, transformers_tokenizer(tmp_path), [*corpus.pieces(), *corpus.with_tokens(["<s>", "</s>", "<unk>"])])


def test_truncation_and_padding_in_the_file_are_ignored(tmp_path: Path) -> None:
    backend = trained()
    backend.enable_truncation(4)
    backend.enable_padding(length=16)
    ours = load_tokenizer(write(tmp_path, backend))
    assert ours.decode(ours.encode(corpus.SENTENCES[0])) == corpus.SENTENCES[0]


def test_random_models_use_a_tokenizer_next_to_the_config(tmp_path: Path) -> None:
    write(tmp_path, trained(), tokenizer_config=NAMED)
    files = ModelFiles("r", "random", tmp_path / "config.json", {"vocab_size": 1000}, ())
    assert load_tokenizer(files).decode([1], skip_special=False) == "<|stop|>"


# ── chat templates of a directory ─────────────────────────────────────────────────────────────────────────────────────
def rendered(files: ModelFiles, **options: Any) -> str:
    return load_chat_template(files, load_tokenizer(files)).render([{"role": "user", "content": "x"}], **options)


def test_template_in_the_settings(tmp_path: Path) -> None:
    files = write(tmp_path, trained(), tokenizer_config=NAMED | {"chat_template": "{{ bos_token }}one"})
    assert rendered(files) == "<|start|>one"


def test_templates_by_name_in_the_settings(tmp_path: Path) -> None:
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
    files = write(tmp_path, trained(), tokenizer_config={"chat_template": named})
    assert rendered(files) == "plain"
    assert rendered(files, tools=[{"type": "function"}]) == "tools"


def test_template_files_come_first(tmp_path: Path) -> None:
    files = write(tmp_path, trained(), tokenizer_config={"chat_template": "settings"})
    (tmp_path / "chat_template.jinja").write_text("file\n", encoding="utf-8")
    assert rendered(files) == "file"
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("tools", encoding="utf-8")
    assert rendered(files, tools=[]) == "tools"


def test_template_in_its_old_file(tmp_path: Path) -> None:
    assert rendered(write(tmp_path, trained(), chat_template={"chat_template": "old"})) == "old"


# ── bad directories ───────────────────────────────────────────────────────────────────────────────────────────────────
def test_a_directory_without_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"There is no .*tokenizer.json.*save_pretrained"):
        load_tokenizer(ModelFiles("m", "safetensors", tmp_path, {}, ()))


@pytest.mark.parametrize("content", ["", "{", "[]", '{"model": {"type": "Nothing"}}'])
def test_a_broken_tokenizer(tmp_path: Path, content: str) -> None:
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(ModelError, match=r"tokenizer.json cannot be read"):
        load_tokenizer(ModelFiles("m", "safetensors", tmp_path, {}, ()))


@pytest.mark.parametrize(("name", "content"), [("tokenizer_config", "{,}"), ("generation_config", "[1]")])
def test_broken_settings(tmp_path: Path, name: str, content: str) -> None:
    files = write(tmp_path, trained())
    (tmp_path / f"{name}.json").write_text(content)
    with pytest.raises(ModelError, match=f"{name}.json"):
        load_tokenizer(files)


def test_stored_padding_and_truncation_do_not_hide_the_special_tokens(tmp_path: Path) -> None:
    """Tokenizers of encoders are stored so that every text has the same number of tokens."""
    write_tokenizer(tmp_path)
    plain = build_hf_tokenizer(tmp_path, {}).encode("the sea is blue")
    backend = Backend.from_file(str(tmp_path / "tokenizer.json"))
    backend.enable_padding(length=16)
    backend.enable_truncation(4)
    backend.save(str(tmp_path / "tokenizer.json"))
    assert build_hf_tokenizer(tmp_path, {}).encode("the sea is blue") == plain
    assert plain[0] == 2
    assert plain[-1] == 3


def test_pairs_are_joined_as_the_tokenizer_joins_them(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    tokenizer = build_hf_tokenizer(tmp_path, {})
    backend = Backend.from_file(str(tmp_path / "tokenizer.json"))
    expected = backend.encode("the sea", "is blue")
    first, second = (tokenizer.encode(text, add_special=False) for text in ("the sea", "is blue"))
    token_ids, second_from = tokenizer.pair.join(first, second)
    assert token_ids == expected.ids
    assert second_from == expected.type_ids.index(1)


def test_a_cut_text_keeps_its_last_special_token(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    tokenizer = build_hf_tokenizer(tmp_path, {})
    token_ids = tokenizer.encode("the sea is blue")
    assert tokenizer.cut(token_ids, 6) == token_ids
    assert tokenizer.cut(token_ids, 4) == [*token_ids[:3], token_ids[-1]]
