"""Finds the drafter that a config names, checks that it fits the target before anything is allocated, and loads it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch

from millrace.config import Config, Quantization, Speculation
from millrace.engine.memory_plan import DrafterMemory
from millrace.errors import ConfigError
from millrace.models.decoder import Decoder
from millrace.models.drafters.load import DrafterFiles, drafter_bytes, kind_in, load_drafter, open_drafter
from millrace.models.drafters.spec import DrafterKind
from millrace.models.load import build_decoder, ends_bytes, has_quantised_weights, load_ends, weight_bytes
from millrace.models.spec.families import spec_from_config
from millrace.models.spec.model_spec import ModelSpec
from millrace.run.device.kv_pool import bytes_per_token, format_or_full
from millrace.run.drafting.drafters import AUTO, MODEL_DRAFTERS
from millrace.run.drafting.models import DrafterModel
from millrace.run.settings import KvFormat
from millrace.sources.drafters import drafter_folder
from millrace.sources.resolve import ModelFiles, Progress, resolve_model

PARAM = "plan.drafter"


class DrafterSource(Protocol):
    """A drafter whose files were found and fit the target. Nothing is loaded yet."""

    @property
    def kind(self) -> Speculation:
        """As `--speculate` names it."""
        ...

    @property
    def max_drafts(self) -> int | None:
        """Drafts of a row in one step; None: any number."""
        ...

    @property
    def reads_all_states(self) -> bool:
        """True if it reads the target's final states of all tokens."""
        return False

    def memory(self, dtype: torch.dtype, kv_dtype: KvFormat, device: torch.device) -> DrafterMemory: ...

    def load(self, target: Decoder) -> DrafterModel:
        """On the target's device, in its dtype."""
        ...


@dataclass(frozen=True, slots=True)
class DraftModelSource(DrafterSource):
    config: Config
    quantization: Quantization
    files: ModelFiles
    spec: ModelSpec
    """All layers in one KV group: its keys and values are in the blocks of the target's first group."""

    @property
    def kind(self) -> Speculation:
        return "draft"

    @property
    def max_drafts(self) -> None:
        return None

    def memory(self, dtype: torch.dtype, kv_dtype: KvFormat, device: torch.device) -> DrafterMemory:
        own_format = format_or_full(kv_dtype, self.spec, dtype=dtype, device=device)
        weights_bytes = weight_bytes(self.files, dtype, self.quantization, device)
        return DrafterMemory(weights_bytes, bytes_per_token(self.spec, dtype, own_format), self.spec)

    def load(self, target: Decoder) -> Decoder:
        from millrace.models.weights import open_weights  # local: imports the readers of all formats

        config = self.config
        return build_decoder(
            self.spec,
            open_weights(self.files, seed=config.model.seed),
            device=target.device,
            dtype=target.dtype,
            deterministic=config.run.deterministic,
            quantization=self.quantization,
        )


@dataclass(frozen=True, slots=True)
class HeadSource(DrafterSource):
    """Medusa heads or a feature drafter."""

    files: DrafterFiles
    is_deterministic: bool
    quantization: Quantization
    split: ModelFiles | None = None
    """Of a target that is split over ranks: the drafter, which only rank 0 has, reads its embedding and head whole."""
    seed: int = 0
    """Of the target's weights, if they are random."""

    @property
    def kind(self) -> Speculation:
        return _named(self.files.spec.kind)

    @property
    def max_drafts(self) -> int | None:
        return self.files.spec.max_drafts

    @property
    def reads_all_states(self) -> bool:
        return self.files.spec.kind != "medusa" and not self.files.spec.target_layers

    def memory(self, dtype: torch.dtype, kv_dtype: KvFormat, device: torch.device) -> DrafterMemory:
        spec, decoder = self.files.spec, self.files.spec.decoder
        weights_bytes = drafter_bytes(self.files, dtype, self.quantization)
        if self.split is not None:
            weights_bytes += ends_bytes(self.split, dtype, self.quantization)
        if decoder is None:
            return DrafterMemory(weights_bytes, kept_width=spec.target_hidden_size)
        own_format = format_or_full(kv_dtype, decoder, dtype=dtype, device=device)
        return DrafterMemory(
            weights_bytes,
            bytes_per_token(decoder, dtype, own_format),
            decoder,
            tap_width=len(spec.target_layers) * spec.target_hidden_size,
            kept_width=spec.hidden_size,
        )

    def load(self, target: Decoder) -> DrafterModel:
        choice: dict[str, Any] = {"deterministic": self.is_deterministic, "quantization": self.quantization}
        if self.split is not None:
            target = load_ends(self.split, seed=self.seed, device=target.device, dtype=target.dtype, **choice)
        return load_drafter(self.files, target, **choice)


def find_drafter(
    config: Config, target: ModelFiles, spec: ModelSpec, quantization: Quantization, progress: Progress | None = None
) -> DrafterSource | None:
    """The drafter that `--speculate` and `--drafter` name; None if drafts come from text alone. With `auto` the files
    say what it is."""
    kind, name = config.plan.speculate, config.plan.drafter
    if kind not in MODEL_DRAFTERS and not (kind == AUTO and name):
        if name:
            raise ConfigError(
                f"plan.drafter is {name}, but plan.speculate is {kind}, which drafts without a model."
                f" Set --speculate {AUTO}, {', '.join(MODEL_DRAFTERS[:-1])} or {MODEL_DRAFTERS[-1]}, or remove"
                " --drafter.",
                param=PARAM,
            )
        return None
    if not name:
        what = "a smaller model with the same tokens" if kind == "draft" else f"{kind} heads trained for the model"
        raise ConfigError(f"plan.speculate is {kind}, which needs {what}. Set --drafter.", param=PARAM)
    folder = None if kind == "draft" else _folder(config, progress)
    if folder is None:
        _check_windows(config, spec)
        return _draft_model(config, target, quantization, progress)
    files = open_drafter(folder, spec)
    _check_kind(config, files, spec)
    if files.spec.kind != "medusa":
        _check_windows(config, spec)
    split = target if config.run.tensor_parallel > 1 else None
    return HeadSource(files, config.run.deterministic, quantization, split, config.model.seed)


def _folder(config: Config, progress: Progress | None) -> Path | None:
    """The directory with the drafter's files; None if `auto` finds a whole model, which is a draft model."""
    name, kind = config.plan.drafter, config.plan.speculate
    folder = drafter_folder(name, progress=progress, offline=config.model.offline)
    if kind != AUTO:
        if folder is None:
            raise ConfigError(
                f"plan.drafter is {name}, which is a whole model, but --speculate {kind} needs heads trained for the"
                " model: a directory, or a hub name such as org/drafter. To draft with a whole model, set --speculate"
                " draft.",
                param=PARAM,
            )
        return folder
    if folder is None or not (folder / "config.json").is_file():  # as in a directory with a GGUF file
        return None
    return None if kind_in(folder) == "draft" else folder


def _named(kind: DrafterKind) -> Speculation:
    return "eagle" if kind == "eagle3" else kind


def _draft_model(
    config: Config, target: ModelFiles, quantization: Quantization, progress: Progress | None
) -> DraftModelSource:
    name = config.plan.drafter
    files = resolve_model(name, progress=progress, offline=config.model.offline)
    _check_tokens(name, files, target)
    if quantization == "int8" and not has_quantised_weights(files):
        quantization = "none"
    return DraftModelSource(config, quantization, files, replace(spec_from_config(files.config), has_kv_groups=False))


def _check_kind(config: Config, files: DrafterFiles, spec: ModelSpec) -> None:
    found = _named(files.spec.kind)
    if config.plan.speculate not in (AUTO, found):
        raise ConfigError(
            f"plan.speculate is {config.plan.speculate}, but {files.folder} is a drafter of the format"
            f" {files.spec.format}. Set --speculate {found}, or name another --drafter.",
            param=PARAM,
        )
    beyond = [layer for layer in files.spec.target_layers if layer >= spec.num_layers]
    if beyond:
        raise ConfigError(
            f"plan.drafter is {files.folder}, which reads the model's state after layer {beyond[0]}; states before the"
            f" last of its {spec.num_layers} layers are supported. Name another --drafter.",
            param=PARAM,
        )


def _check_windows(config: Config, spec: ModelSpec) -> None:
    if spec.kv_groups.windows[0] is not None:
        raise ConfigError(
            f"plan.speculate is {config.plan.speculate}, but every layer of {config.model.source} has a window: blocks"
            " behind it are freed, and the drafter needs them. Use --speculate medusa or ngram.",
            param="plan.speculate",
        )


def _check_tokens(name: str, files: ModelFiles, target: ModelFiles) -> None:
    """The same tokens with the same ids. The sizes of the vocabularies may differ by padding."""
    from millrace.text.tokenizers.load import load_tokenizer  # local: imports tokenizers
    from millrace.text.tokenizers.same_tokens import first_difference

    if files.path == target.path:
        return
    difference = first_difference(load_tokenizer(target), load_tokenizer(files))
    if difference is not None:
        token_id, own, other = difference
        raise ConfigError(
            f"plan.drafter is {name}, whose tokens are not those of {target.name}: token {token_id} is"
            f" {_shown(own)} in {target.name} and {_shown(other)} in {name}. A draft model must have the same"
            " tokenizer; take a smaller model of the same family.",
            param=PARAM,
        )


def _shown(token: str | None) -> str:
    return "missing" if token is None else repr(token)
