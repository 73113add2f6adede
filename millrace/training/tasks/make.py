"""Makes the task of a kind, with the spec of the drafter that it trains."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from millrace.errors import ConfigError
from millrace.models.drafters.spec import DrafterSpec
from millrace.models.spec.model_spec import LayerSpec, ModelSpec
from millrace.training.options import TrainOptions
from millrace.training.target import Target
from millrace.training.tasks.draft import DraftTask, draft_spec
from millrace.training.tasks.eagle import EagleTask
from millrace.training.tasks.medusa import MedusaTask
from millrace.training.tasks.task import Task, Vocabulary


def check_options(options: TrainOptions, target: ModelSpec) -> None:
    """Refuse, before anything is generated, what this kind cannot train for this target."""
    if options.kind == "draft":
        draft_spec(target, options.num_layers)
        if options.draft_vocabulary:
            raise ConfigError(
                "--draft-vocabulary is for --kind eagle and medusa: a draft model has the target's whole vocabulary.",
                param="draft_vocabulary",
            )
    if not 0 <= options.draft_vocabulary < target.vocab_size:
        raise ConfigError(
            f"--draft-vocabulary is {options.draft_vocabulary}; the target has {target.vocab_size} tokens. Give fewer,"
            " or 0 for all.",
            param="draft_vocabulary",
        )


def make_task(options: TrainOptions, target: Target, ids: Tensor | None) -> Task:
    """`ids`: the tokens of a reduced draft vocabulary, ascending."""
    torch.manual_seed(options.seed)
    vocabulary = Vocabulary(target, ids)
    if options.kind == "draft":
        decoder, chosen = draft_spec(target.spec, options.num_layers)
        return DraftTask(_spec("draft", target.spec, vocabulary, decoder), target, vocabulary, options.depth, chosen)
    if options.kind == "medusa":
        spec = replace(
            _spec("medusa", target.spec, vocabulary, None),
            num_medusa_heads=options.depth,
            num_medusa_blocks=1,
            has_shared_head=ids is not None,
        )
        return MedusaTask(spec, target, vocabulary)
    spec = _spec("eagle", target.spec, vocabulary, _one_layer(target.spec))
    return EagleTask(replace(spec, fc_bias=True, has_own_head=ids is not None), target, vocabulary, options.depth)


def _spec(kind: str, target: ModelSpec, vocabulary: Vocabulary, decoder: ModelSpec | None) -> DrafterSpec:
    is_draft = kind == "draft"
    return DrafterSpec(
        "draft" if is_draft else "medusa" if kind == "medusa" else "eagle",
        kind,
        hidden_size=target.hidden_size,
        target_hidden_size=target.hidden_size,
        vocab_size=target.vocab_size,
        draft_vocab_size=vocabulary.size,
        decoder=decoder,
        has_own_embedding=is_draft,
        has_own_head=is_draft,
        has_final_norm=is_draft,
    )


def _one_layer(target: ModelSpec) -> ModelSpec:
    """A plain Llama layer of the target's width."""
    inner = target.inner_size if target.moe is None else 3 * target.hidden_size
    return ModelSpec(
        family="llama",
        vocab_size=target.vocab_size,
        hidden_size=target.hidden_size,
        inner_size=inner,
        num_heads=target.num_heads,
        num_kv_heads=target.num_kv_heads,
        head_dim=target.head_dim,
        max_context=target.max_context,
        layers=(LayerSpec(),),
        ropes=target.ropes[:1],
        norm_eps=target.norm_eps,
        attention_scale=target.head_dim**-0.5,
        has_kv_groups=False,
    )
