"""Documents at other positions on CudaRunner: the tokens of the plain runner, which copies the same keys and values.

Without a GPU the runner's kernels are interpreted.
"""

from __future__ import annotations

from contextlib import nullcontext

import numpy as np
import pytest
import torch
from helpers.decode_table import want_few_programs
from helpers.quick_interpreter import quick_interpreter
from helpers.small_decoder import decoder_for
from helpers.tiny_models import VOCAB
from helpers.triton_mode import device as place
from helpers.triton_mode import interpreted

from millrace.config import RunConfig
from millrace.params.keeping import Documents, DocumentSpan
from millrace.params.rows import RowParams
from millrace.params.sampling import SamplingParams
from millrace.plan.request import Request
from millrace.plan.scheduler import Scheduler, SchedulerSettings
from millrace.plan.shapes.choice import ShapeChoice
from millrace.run.cuda_runner import CudaRunner
from millrace.run.device.device import CpuDevice, open_device
from millrace.run.runner import Runner
from millrace.run.settings import RunnerSettings

SETTINGS = RunnerSettings(num_blocks=40, block_size=4, max_rows=2, max_context=32, token_budget=16)
ASKED = RowParams(SamplingParams(temperature=0, max_tokens=2, ignore_eos=True))


def requests(*, marked: bool = True) -> list[Request]:
    """A text alone, and a prompt in which it stands; all but the first of its tokens may be placed."""
    rng = np.random.default_rng(7)
    text, before, after = (rng.integers(6, VOCAB, count).astype(np.int32) for count in (8, 3, 2))
    documents = Documents((DocumentSpan(3, 11, 4),)) if marked else None
    prompt = np.concatenate((before, text, after))
    return [Request(1, text, 0, row_params=ASKED), Request(2, prompt, 2, row_params=ASKED, documents=documents)]


def answer(runner: Runner | CudaRunner, asked: list[Request]) -> list[int]:
    scheduler = Scheduler(
        SchedulerSettings(num_blocks=40, block_size=4, max_running=2, token_budget=16, mixed_budget=16),
        shapes=ShapeChoice(runner.shapes),
    )
    tokens: list[int] = []
    for request in asked:
        scheduler.submit(request)
        while scheduler.has_work:
            plan = scheduler.plan(0.0)
            assert plan is not None
            tokens += scheduler.apply(plan.step_no, runner.launch(plan).wait().drawn()).tokens.tolist()
    return tokens


def test_the_tokens_are_those_of_the_plain_runner(monkeypatch: pytest.MonkeyPatch) -> None:
    if interpreted:
        want_few_programs(monkeypatch)
    sizes = {"num_hidden_layers": 2}
    plain = Runner(decoder_for(torch.device("cpu"), paged=False, **sizes), CpuDevice(1), SETTINGS)
    device = open_device(RunConfig(device="cuda")) if place.type == "cuda" else CpuDevice(1)
    fast = CudaRunner(decoder_for(place, paged=True, **sizes), device, SETTINGS)
    answers = []
    for runner in (plain, fast):
        asked = requests()
        with quick_interpreter() if interpreted and runner is fast else nullcontext():
            answers.append(answer(runner, asked))
        assert asked[1].placed_tokens == 7
    assert answers[0] == answers[1]
    assert answer(plain, requests(marked=False)) != answers[0], "approximate answers that are exact prove nothing"
