"""What `--tensor-parallel` cannot be combined with, and what a user should know about it."""

from __future__ import annotations

from collections.abc import Iterator

from millrace.config import Config
from millrace.errors import ConfigError
from millrace.host.cores import usable_cores
from millrace.run.device.device import Device, ranks_per_device

PARAM = "run.tensor_parallel"


def check_ranks(config: Config) -> None:
    """Raises a ConfigError."""
    if config.run.tensor_parallel == 1:
        return
    if config.plan.mirror:
        raise ConfigError(
            "--mirror runs beside an engine of one process. With --tensor-parallel every rank draws every token, and"
            " the draws are compared anyway: leave --mirror out.",
            param="mirror",
        )


def check_encoder_ranks(config: Config) -> None:
    if config.run.tensor_parallel > 1:
        raise ConfigError(
            "The model is an encoder, and --tensor-parallel splits only models that generate text. Leave it out.",
            param=PARAM,
        )


def check_device_ranks(config: Config, device: Device) -> None:
    if config.run.tensor_parallel == 1 or not device.defaults.has_own_memory:
        return
    if config.plan.drafter:
        raise ConfigError(
            "On a GPU, --tensor-parallel goes with drafts from text alone so far. Leave --drafter out, and set"
            " --speculate ngram for drafts.",
            param=PARAM,
        )
    if config.adapters.num_slots:
        raise ConfigError(
            "On a GPU, --tensor-parallel goes without adapters so far. Leave one of them out.", param=PARAM
        )


def rank_notes(config: Config, device: Device) -> Iterator[str]:
    size = config.run.tensor_parallel
    if size == 1:
        return
    if device.defaults.has_own_memory:
        yield f"Tensor parallel: {size} processes. All sizes are those of one process."
        if ranks_per_device(device, size) > 1:
            yield (
                f"Tensor parallel: {size} processes share GPUs, which compute for one of them at a time. That is right,"
                " and slower than one process: split a model over as many GPUs."
            )
        return
    yield (
        f"Tensor parallel: {size} processes ({device.name()} each). All sizes are those of one process. Layers run op"
        " by op, because the C++ step computes on one rank only."
    )
    if size > usable_cores():
        yield (
            f"Tensor parallel: {size} processes share {usable_cores()} cores, so they wait for each other. Set"
            f" --tensor-parallel {usable_cores()} or less."
        )
