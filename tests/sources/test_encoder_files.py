"""What an encoder's files say is read, not guessed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from millrace.errors import ModelError
from millrace.sources.encoders.encoder_files import EncoderFiles, encoder_files, is_encoder

BERT = {"model_type": "bert", "architectures": ["BertModel"], "max_position_embeddings": 512}


def read(folder: Path, config: dict[str, Any], **files: Any) -> EncoderFiles:
    """`files`: content by name, with __ for a slash."""
    for name, content in files.items():
        path = folder / (name.replace("__", "/") + ".json")
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(content))
    return encoder_files(folder, config)


def modules(*kinds: str) -> list[dict[str, Any]]:
    return [{"path": "" if index == 0 else kind, "type": f"x.models.{kind}"} for index, kind in enumerate(kinds)]


def test_an_encoder_is_known_by_its_model_type() -> None:
    assert is_encoder(BERT)
    assert not is_encoder({"model_type": "llama"})
    assert not is_encoder({**BERT, "is_decoder": True})


def test_without_module_files_the_mean_is_pooled_and_says_that_it_is_a_default(tmp_path: Path) -> None:
    found = read(tmp_path, BERT)
    assert (found.task, found.pooling, found.normalises, found.has_modules) == ("embed", ("mean",), True, False)


def test_modules_say_pooling_normalisation_and_prompts(tmp_path: Path) -> None:
    found = read(
        tmp_path,
        BERT,
        modules=modules("Transformer", "Pooling"),
        Pooling__config={"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False, "include_prompt": False},
        config_sentence_transformers={"prompts": {"query": "query: "}, "default_prompt_name": "query"},
        sentence_bert_config={"max_seq_length": 128, "do_lower_case": True},
    )
    assert (found.pooling, found.normalises, found.max_tokens, found.lower_case) == (("cls",), False, 128, True)
    assert (found.prompts.text(None), found.prompts.text("document")) == ("query: ", "")
    assert not found.prompts.are_pooled


@pytest.mark.parametrize(
    ("config", "settings", "limit"),
    [
        (BERT, {"max_seq_length": 256}, 256),
        (BERT, {"max_seq_length": 4096}, 512),
        (BERT, {}, 512),
        ({**BERT, "model_type": "xlm-roberta", "max_position_embeddings": 514, "pad_token_id": 1}, {}, 512),
    ],
)
def test_the_longest_input_fits_the_position_table_and_the_module_file(
    tmp_path: Path, config: dict[str, Any], settings: dict[str, Any], limit: int
) -> None:
    assert read(tmp_path, config, sentence_bert_config=settings).max_tokens == limit


def test_a_tokenizer_may_limit_an_input_that_no_module_file_limits(tmp_path: Path) -> None:
    assert read(tmp_path, BERT, tokenizer_config={"model_max_length": 64}).max_tokens == 64
    assert read(tmp_path, BERT, tokenizer_config={"model_max_length": 10**30}).max_tokens == 512


@pytest.mark.parametrize(
    ("change", "activation", "ranks"),
    [
        ({"id2label": {"0": "LABEL_0"}}, "sigmoid", True),
        ({"id2label": {"0": "L"}, "sentence_transformers": {"activation_fn": "torch.nn.Identity"}}, "identity", True),
        ({"id2label": {"1": "b", "0": "a"}}, "softmax", False),
        ({"id2label": {"1": "b", "0": "a"}, "problem_type": "multi_label_classification"}, "sigmoid", False),
    ],
)
def test_a_classifier_has_labels_and_an_activation(
    tmp_path: Path, change: dict[str, Any], activation: str, ranks: bool
) -> None:
    found = read(tmp_path, {**BERT, "architectures": ["BertForSequenceClassification"], **change})
    assert (found.task, found.activation, found.ranks) == ("classify", activation, ranks)
    assert found.labels[0] == change["id2label"]["0"]


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"modules": modules("Transformer", "CNN")}, "CNN"),
        ({"modules": modules("Transformer", "Normalize")}, "no pooling"),
        ({"modules": modules("Transformer", "Pooling")}, "how token states are pooled"),
        ({"modules": modules("Transformer", "Pooling"), "Pooling__config": {"pooling_mode": "median"}}, "median"),
        ({"modules": {}}, "form"),
    ],
)
def test_files_that_cannot_be_followed_are_refused(tmp_path: Path, files: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        read(tmp_path, BERT, **files)
