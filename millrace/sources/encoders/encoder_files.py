"""What the files of an encoder say: what it gives, how its states become vectors, and how long its inputs may be.

sentence-transformers stores these as module files beside the weights (modules.json and a folder per module). They are
read as they are; a model without them is what its architecture's name says.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from millrace.errors import ModelError
from millrace.sources.encoders.families import is_encoder
from millrace.sources.encoders.json_files import json_file
from millrace.sources.encoders.retrieval_files import MultiForm, SparseForm, multi_form, sparse_form
from millrace.sources.resolve import ModelFiles

EncoderTask = Literal["embed", "sparse", "multi", "classify", "tag"]
"""`embed`: a vector per text. `sparse`: weights of vocabulary tokens per text (SPLADE). `multi`: a vector per token
(ColBERT). `classify`: logits per text or pair of texts. `tag`: logits per token."""
PoolingMode = Literal["cls", "mean", "max", "mean_sqrt_len_tokens", "weightedmean", "lasttoken"]
ScoreActivation = Literal["sigmoid", "softmax", "identity"]

_OFFSET_TYPES = frozenset({"roberta", "xlm-roberta", "camembert", "mpnet"})
"""Their position tables begin after the padding token's id."""
_TASKS: tuple[tuple[str, EncoderTask], ...] = (
    ("ForSequenceClassification", "classify"),
    ("ForTokenClassification", "tag"),
)
_LEGACY_MODES: dict[str, PoolingMode] = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
_MODES = frozenset(_LEGACY_MODES.values())
_ACTIVATIONS = {"Identity": "identity", "Tanh": "tanh", "ReLU": "relu", "GELU": "gelu", "SiLU": "silu"}


@dataclass(frozen=True, slots=True)
class DenseModule:
    """A linear layer after pooling."""

    folder: Path
    in_features: int
    out_features: int
    """0: as many as the stored layer has."""
    has_bias: bool
    activation: str


@dataclass(frozen=True, slots=True)
class Prompts:
    """Texts that are put before an input, by name: `query`, `document` and others."""

    by_name: Mapping[str, str] = field(default_factory=dict)
    default: str = ""
    """Name of the prompt of inputs that name none; "" for none."""
    are_pooled: bool = True
    """False if pooling leaves the prompt's tokens out."""

    def text(self, name: str | None) -> str:
        """The prompt with this name, or the default one; "" if there is none."""
        return self.by_name.get(name if name is not None else self.default, "")


@dataclass(frozen=True, slots=True)
class PairForm:
    """A reranker that reads one text made of both, as the section `millrace` of config.json says."""

    text: str
    """With {query} and {document}."""
    label: int
    """Index of the class whose probability is the score."""

    def joined(self, query: str, document: str) -> str:
        before, _, after = self.text.partition("{document}")
        return before.replace("{query}", query) + document + after.replace("{query}", query)


@dataclass(frozen=True, slots=True)
class EncoderFiles:
    task: EncoderTask
    max_tokens: int
    """Of one input, special tokens included."""
    pooling: tuple[PoolingMode, ...] = ("mean",)
    """Joined if there are several."""
    dense: tuple[DenseModule, ...] = ()
    normalises: bool = True
    prompts: Prompts = field(default_factory=Prompts)
    labels: tuple[str, ...] = ()
    """Of a classifier, by index."""
    activation: ScoreActivation = "identity"
    """What turns a classifier's logits into scores."""
    lower_case: bool = False
    is_decoder: bool = False
    """True for a model that also writes text."""
    pair: PairForm | None = None
    """Of a classifier that ranks with one of its classes; None: a cross-encoder with one logit, or no reranker."""
    sparse: SparseForm | None = None
    """Of the task `sparse`."""
    multi: MultiForm | None = None
    """Of the task `multi`."""
    has_modules: bool = True
    """False if no module files say how states become vectors, so that defaults hold."""

    @property
    def ranks(self) -> bool:
        """True for a cross-encoder: one logit for two texts, or one class that says how relevant a document is."""
        return self.task == "classify" and (len(self.labels) == 1 or self.pair is not None)


def read_encoder(files: ModelFiles) -> EncoderFiles | None:
    """None for a model that writes text and has no module files. With them, a decoder is an embedder too."""
    folder = files.path if files.kind in ("safetensors", "onnx") else files.path.parent
    if is_encoder(files.config):
        if files.kind == "gguf":
            return _from_gguf(files.config)
        return encoder_files(folder, files.config)
    modules = json_file(folder / "modules.json", list) if files.kind == "safetensors" else None
    return None if modules is None else _embedder(folder, modules, 0, is_decoder=True)


def _from_gguf(config: Mapping[str, Any]) -> EncoderFiles:
    """Other engines give vectors of such files length 1, which the files do not say."""
    task, max_tokens, mode = _task(config), int(config["max_position_embeddings"]), config["pooling"]
    if task == "classify":
        labels = _labels(config)
        return EncoderFiles(task, max_tokens, labels=labels, activation=_activation(config, len(labels)))
    return EncoderFiles(task, max_tokens, (mode or "mean",), has_modules=mode is not None)


def encoder_files(folder: Path, config: Mapping[str, Any]) -> EncoderFiles:
    task = _task(config)
    max_tokens = _max_tokens(folder, config)
    if task != "embed":
        labels = _labels(config)
        pair = _pair(config, labels) if task == "classify" else None
        return EncoderFiles(task, max_tokens, labels=labels, activation=_activation(config, len(labels)), pair=pair)
    modules = json_file(folder / "modules.json", list)
    if modules is None and "HF_ColBERT" in (config.get("architectures") or ()):
        dense = (_stanford_projection(folder, config),)
        return EncoderFiles("multi", max_tokens, (), dense, multi=multi_form(folder, [], is_stanford=True))
    if modules is None:
        return EncoderFiles(task, max_tokens, has_modules=False)
    return _embedder(folder, modules, max_tokens)


def _embedder(folder: Path, modules: list[Any], max_tokens: int, *, is_decoder: bool = False) -> EncoderFiles:
    pooling: tuple[PoolingMode, ...] = ()
    dense: list[DenseModule] = []
    normalises = are_pooled = False
    kinds: list[tuple[str, Path]] = []
    for module in modules:
        kind, place = str(module.get("type", "")).rpartition(".")[2], folder / str(module.get("path", ""))
        kinds.append((kind, place))
        if kind == "Pooling":
            pooling, are_pooled = _pooling(place / "config.json")
        elif kind == "Dense":
            dense.append(_dense(place))
        elif kind == "Normalize":
            normalises = True
        elif kind not in ("Transformer", "MLMTransformer", "Dropout", "SpladePooling", "MultiVectorMask"):
            raise ModelError(
                f"{folder / 'modules.json'} names the module {module.get('type')}, which is not supported."
            )
    sparse, multi = sparse_form(kinds), multi_form(folder, kinds)
    task: EncoderTask = "embed" if sparse is None and multi is None else "multi" if sparse is None else "sparse"
    if task != "embed" and is_decoder:
        raise ModelError(f"{folder / 'modules.json'}: sparse and multi-vector outputs are supported of encoders only.")
    if task == "embed" and not pooling:
        raise ModelError(f"{folder / 'modules.json'} names no pooling module, so the model gives no vector per text.")
    settings = json_file(folder / "config_sentence_transformers.json", dict) or {}
    by_name = {str(name): str(text) for name, text in (settings.get("prompts") or {}).items()}
    prompts = Prompts(by_name, str(settings.get("default_prompt_name") or ""), are_pooled or task != "embed")
    lower_case = bool(_transformer_settings(folder).get("do_lower_case"))
    return EncoderFiles(
        task,
        max_tokens,
        pooling,
        tuple(dense),
        normalises or (multi is not None and multi.is_pylate),
        prompts,
        lower_case=lower_case,
        is_decoder=is_decoder,
        sparse=sparse,
        multi=multi,
    )


def _stanford_projection(folder: Path, config: Mapping[str, Any]) -> DenseModule:
    """The layer `linear` beside the weights of the encoder."""
    return DenseModule(folder, int(config["hidden_size"]), 0, False, "identity")


def _pooling(path: Path) -> tuple[tuple[PoolingMode, ...], bool]:
    settings = json_file(path, dict)
    if settings is None:
        raise ModelError(f"There is no {path}, which says how token states are pooled. Download the file.")
    stored = settings.get("pooling_mode")
    modes: list[Any] = [stored] if isinstance(stored, str) else list(stored or [])
    modes += [mode for key, mode in _LEGACY_MODES.items() if settings.get(key)]
    unknown = [mode for mode in modes if mode not in _MODES]
    if unknown or not modes:
        raise ModelError(f"{path} sets the pooling {unknown or modes}; known are {', '.join(sorted(_MODES))}.")
    return tuple(modes), bool(settings.get("include_prompt", True))


def _dense(folder: Path) -> DenseModule:
    settings = json_file(folder / "config.json", dict)
    if settings is None or not (folder / "model.safetensors").is_file():
        raise ModelError(f"{folder} needs config.json and model.safetensors. Download both.")
    if settings.get("use_residual"):
        raise ModelError(f"{folder / 'config.json'} sets use_residual, which is not supported.")
    name = str(settings.get("activation_function", "torch.nn.modules.activation.Tanh")).rpartition(".")[2]
    if name not in _ACTIVATIONS:
        raise ModelError(f"{folder / 'config.json'} sets the activation {name}; known are {', '.join(_ACTIVATIONS)}.")
    has_bias = bool(settings.get("bias", True))
    return DenseModule(
        folder, int(settings["in_features"]), int(settings["out_features"]), has_bias, _ACTIVATIONS[name]
    )


def _task(config: Mapping[str, Any]) -> EncoderTask:
    for name in config.get("architectures") or ():
        for suffix, task in _TASKS:
            if str(name).endswith(suffix):
                return task
    return "embed"


def _labels(config: Mapping[str, Any]) -> tuple[str, ...]:
    names = config.get("id2label")
    if isinstance(names, dict) and names:
        return tuple(str(names[key]) for key in sorted(names, key=int))
    return tuple(f"LABEL_{index}" for index in range(int(config.get("num_labels") or 2)))


def _pair(config: Mapping[str, Any], labels: tuple[str, ...]) -> PairForm | None:
    own = config.get("millrace") or {}
    text, label = own.get("pair_text"), own.get("relevant_label")
    if text is None and label is None:
        return None
    if label not in labels or any(str(text).count(part) != 1 for part in ("{query}", "{document}")):
        raise ModelError(
            "The section 'millrace' of config.json needs pair_text, with {query} and {document} once each, and"
            f" relevant_label, one of {', '.join(labels)}; it has {text!r} and {label!r}."
        )
    return PairForm(str(text), labels.index(label))


def _activation(config: Mapping[str, Any], num_labels: int) -> ScoreActivation:
    """sentence-transformers stores its own; otherwise one label, or several at once, is a sigmoid."""
    own = config.get("sentence_transformers")
    stored = (own.get("activation_fn") if isinstance(own, dict) else None) or config.get(
        "sbert_ce_default_activation_function"
    )
    if stored is not None:
        name = str(stored).rpartition(".")[2].lower()
        if name in ("sigmoid", "identity"):
            return "sigmoid" if name == "sigmoid" else "identity"
        raise ModelError(f"config.json sets the activation {stored} for scores; known are Sigmoid and Identity.")
    is_sigmoid = num_labels == 1 or config.get("problem_type") == "multi_label_classification"
    return "sigmoid" if is_sigmoid else "softmax"


def _max_tokens(folder: Path, config: Mapping[str, Any]) -> int:
    """The least of what the position table, the module files and the tokenizer allow."""
    table = config.get("max_position_embeddings") or config.get("n_positions") or 512
    if config.get("model_type") in _OFFSET_TYPES:
        pad = config.get("pad_token_id")
        table = int(table) - (1 if pad is None else int(pad)) - 1
    stored = _transformer_settings(folder).get("max_seq_length")
    if stored is None:  # Tokenizers without a limit store a very large number.
        stored = (json_file(folder / "tokenizer_config.json", dict) or {}).get("model_max_length")
    limits = [int(table), *([int(stored)] if isinstance(stored, int | float) and stored > 0 else [])]
    return min(limits)


def _transformer_settings(folder: Path) -> dict[str, Any]:
    return json_file(folder / "sentence_bert_config.json", dict) or {}
