"""The optimiser's loop: bounded by steps or by time, with checkpoints from which a later run continues exactly."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from millrace.errors import ConfigError
from millrace.training.answers import Answer
from millrace.training.batches import make_batch, plan_batches
from millrace.training.options import LoopOptions, Reporter
from millrace.training.tasks.task import Learned, Losses

WARM_UP = 0.04
"""Share of the training in which the learning rate rises."""
MAX_NORM = 1.0
CHECKPOINT = "checkpoint.pt"
LOG_EVERY = 10


@dataclass(slots=True)
class Curves:
    """What the picture shows."""

    steps: list[int] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    features: list[float] = field(default_factory=list)
    measured_at: list[int] = field(default_factory=list)
    acceptance: list[list[float]] = field(default_factory=list)
    """Per measurement the rate of each drafted place; of an adapter its loss."""


@dataclass(slots=True)
class Progress:
    step: int = 0
    elapsed_s: float = 0.0
    curves: Curves = field(default_factory=Curves)


class Loop:
    def __init__(
        self,
        task: Learned,
        answers: Sequence[Answer],
        options: LoopOptions,
        batch_tokens: int,
        device: torch.device,
        measure: Callable[[], tuple[float, ...]],
    ) -> None:
        """`measure`: acceptance of each drafted place now, on held-out answers; of an adapter the loss."""
        self._task, self._answers, self._options, self._device = task, answers, options, device
        self._batch_tokens, self._measure = batch_tokens, measure
        self._lengths = [len(answer.token_ids) for answer in answers]
        self._optimiser = torch.optim.AdamW(
            task.module.parameters(), lr=options.peak_rate, betas=(0.9, 0.95), weight_decay=0.0
        )
        self.progress = Progress()
        self.steps_per_epoch = len(plan_batches(self._lengths, batch_tokens, options.seed))
        self.num_steps = max(1, math.ceil(options.epochs * self.steps_per_epoch))
        self._order: tuple[int, list[list[int]]] = (-1, [])

    def run(self, report: Reporter) -> Curves:
        if self._options.resume:
            self._load()
        options, progress = self._options, self.progress
        report.stage("training", self.num_steps)
        report.advance(progress.step)
        self._task.module.train()
        began = time.monotonic() - progress.elapsed_s
        while progress.step < self.num_steps and self._share() < 1.0:
            self._set_rate(self._share())
            losses = self._step(progress.step)
            progress.step += 1
            progress.elapsed_s = time.monotonic() - began
            self._log(losses)
            if progress.step % options.save_every == 0:
                self._record_acceptance()
                self._save()
            report.advance(1, f"loss {losses.tokens:.2f}")
        if not progress.curves.measured_at or progress.curves.measured_at[-1] != progress.step:
            self._record_acceptance()
        self._save()
        return progress.curves

    def _share(self) -> float:
        """How much of the training is done, by steps or by time."""
        limit = self._options.minutes * 60.0
        by_time = self.progress.elapsed_s / limit if limit else 0.0
        return max(self.progress.step / self.num_steps, by_time)

    def _set_rate(self, share: float) -> None:
        """Rises linearly, then falls as a cosine to a tenth."""
        rise = min(1.0, (share + 1e-3) / WARM_UP)
        fall = 0.55 + 0.45 * math.cos(math.pi * max(0.0, share - WARM_UP) / (1.0 - WARM_UP))
        for group in self._optimiser.param_groups:
            group["lr"] = self._options.peak_rate * rise * fall

    def _step(self, step: int) -> Losses:
        batch = make_batch([self._answers[index] for index in self._indices(step)], self._device)
        with torch.autocast("cuda", torch.bfloat16, enabled=self._device.type == "cuda"):
            losses = self._task.losses(batch)
        self._optimiser.zero_grad(set_to_none=True)
        if losses.total.requires_grad:
            losses.total.backward()  # type: ignore[no-untyped-call]
            torch.nn.utils.clip_grad_norm_(self._task.module.parameters(), MAX_NORM)
            self._optimiser.step()
        return losses

    def _indices(self, step: int) -> list[int]:
        """The sequences of a step depend on the seed and the step alone, so a resumed run sees the same order."""
        epoch, place = divmod(step, self.steps_per_epoch)
        if self._order[0] != epoch:
            self._order = epoch, plan_batches(self._lengths, self._batch_tokens, self._options.seed + epoch)
        plan = self._order[1]
        return plan[min(place, len(plan) - 1)]

    def _log(self, losses: Losses) -> None:
        curves, step = self.progress.curves, self.progress.step
        if step % LOG_EVERY == 1 or step == self.num_steps:
            curves.steps.append(step)
            curves.losses.append(losses.tokens)
            curves.features.append(losses.features)

    def _record_acceptance(self) -> None:
        self._task.module.eval()
        self.progress.curves.measured_at.append(self.progress.step)
        self.progress.curves.acceptance.append(list(self._measure()))
        self._task.module.train()

    # --- checkpoints ---

    def _path(self) -> Path:
        return self._options.output / CHECKPOINT

    def _save(self) -> None:
        progress, curves = self.progress, self.progress.curves
        state = {
            "kind": self._options.kind,
            "module": self._task.module.state_dict(),
            "optimiser": self._optimiser.state_dict(),
            "step": progress.step,
            "elapsed_s": progress.elapsed_s,
            "curves": [curves.steps, curves.losses, curves.features, curves.measured_at, curves.acceptance],
        }
        unfinished = self._path().with_suffix(".unfinished")
        torch.save(state, unfinished)
        unfinished.replace(self._path())

    def _load(self) -> None:
        path = self._path()
        if not path.is_file():
            return
        state = torch.load(path, map_location=self._device, weights_only=True)
        if state["kind"] != self._options.kind:
            raise ConfigError(
                f"{path} is of kind {state['kind']}. Resume it with the options of the first run.", param="kind"
            )
        try:
            self._task.module.load_state_dict(state["module"])
        except RuntimeError as error:
            raise ConfigError(
                f"{path} does not fit these options: {error}. Resume with the options of the first run.", param="resume"
            ) from error
        self._optimiser.load_state_dict(state["optimiser"])
        self.progress = Progress(state["step"], state["elapsed_s"], Curves(*state["curves"]))


def finished(output: Path) -> bool:
    """True if the directory already holds a finished drafter."""
    return (output / "model.safetensors").is_file()
