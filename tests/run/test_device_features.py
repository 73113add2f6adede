"""EAGLE, EAGLE-3 and Medusa heads on CudaRunner: tokens are those without drafts, and drafts are those that the drafter
makes of the same tokens at once, from empty caches.

On a GPU this replays graphs; elsewhere the same code runs uncaptured, its kernels interpreted.
"""

from __future__ import annotations

import dataclasses
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from helpers.decode_table import want_few_programs
from helpers.quick_interpreter import quick_interpreter
from helpers.small_decoder import paged_attention, with_paged_attention
from helpers.tiny_models import StateDictSource, config_of, make_reference
from helpers.triton_mode import device as place
from helpers.triton_mode import interpreted
from run.test_device_drafts import BUDGET, GREEDY, SIZES, Drive, requests
from run.test_model_drafters import drafts_at_once, eagle, eagle3, medusa

from millrace.config import RunConfig
from millrace.models.decoder import Decoder
from millrace.models.drafters.program import EagleDrafter, MedusaDrafter
from millrace.models.load import build_decoder
from millrace.models.spec.families import spec_from_config
from millrace.ops.attention import PagedAttention
from millrace.plan.drafts import DraftSettings
from millrace.run.cuda_runner import CudaRunner
from millrace.run.device.device import CpuDevice, open_device
from millrace.run.drafting.device_chain import DeviceDrafter, DueRows, FedRows
from millrace.run.drafting.device_features import RowStates
from millrace.run.graphs.step_work import Accept, Propose
from millrace.run.runner import Runner
from millrace.run.settings import RunnerSettings

CPU = torch.device("cpu")


def target_on(device: torch.device, *, paged: bool) -> Decoder:
    model = make_reference("llama")
    spec = spec_from_config(config_of(model))
    decoder = build_decoder(spec, StateDictSource.of(model), device=device, dtype=torch.float32)
    return with_paged_attention(decoder) if paged else decoder


def drafter_with_paged_attention(drafter: Any) -> Any:
    """See `with_paged_attention`: loading offers no GPU's op on a CPU."""
    if isinstance(drafter, EagleDrafter) and not isinstance(drafter.attention, PagedAttention):
        assert drafter.spec.decoder is not None
        # No setting of loading puts an op of a GPU in place.
        drafter._ops = dataclasses.replace(drafter._ops, attention=paged_attention(drafter.spec.decoder))
    return drafter


@pytest.mark.parametrize(
    ("kind", "make"), [("eagle", eagle), ("eagle", eagle3), ("medusa", medusa)], ids=["eagle", "eagle3", "medusa"]
)
def test_drafts_follow_from_the_tokens_and_change_none(
    kind: Any, make: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if interpreted and make is not eagle:
        pytest.skip("takes long interpreted; what is special about it is held to the reference elsewhere")
    if interpreted:
        want_few_programs(monkeypatch)
    device = open_device(RunConfig(device="cuda")) if place.type == "cuda" else CpuDevice(1)
    target, reference = target_on(place, paged=True), target_on(CPU, paged=False)
    torch.manual_seed(5)
    drafter = drafter_with_paged_attention(make(tmp_path, target))
    runner = CudaRunner(target, device, RunnerSettings(token_budget=BUDGET, speculate=kind, **SIZES), drafter=drafter)
    seen: list[tuple[list[int], list[int]]] = []
    record_drafts(runner, seen, monkeypatch)
    num_rows, length = (1, 4) if interpreted else (3, 14)
    kinds = [msgspec.structs.replace(GREEDY, max_tokens=length)] * num_rows
    plain = Runner(reference, CpuDevice(1), RunnerSettings(**SIZES))
    expected = Drive(plain, DraftSettings()).run(requests(kinds)[:2], requests(kinds)[2:])
    drive = Drive(runner, DraftSettings(max_drafts=3, max_places=SIZES["max_rows"]))
    with quick_interpreter() if interpreted else nullcontext():
        assert drive.run(requests(kinds)[:2], requests(kinds)[2:]) == expected
    torch.manual_seed(5)
    own = make(tmp_path, reference)
    assert len(seen) >= (1 if interpreted else 8)
    for tokens, drafts in seen:
        assert drafts == at_once(reference, own, tokens, len(drafts)), tokens


def record_drafts(runner: CudaRunner, seen: list[tuple[list[int], list[int]]], monkeypatch: pytest.MonkeyPatch) -> None:
    """What each row had, and its drafts, after each proposal."""
    # Records what each graph would replay: tokens do not show it.
    run, work = runner.graphs.run, runner.work
    propose = work.propose_drafts

    def recorded(key: Any, call: Any, *, captures: bool) -> Any:
        result = run(key, call, captures=captures)
        if getattr(call, "func", None) == propose:
            layout = runner.writer.layout(call.args[0])
            sections = (layout.table_rows, layout.max_drafts)
            rows, most = (work.packet[own.start :][: own.length].tolist() for own in sections)
            columns = runner.device_drafts.columns if runner.device_drafts is not None else None
            assert columns is not None
            for row, count in zip(rows, most, strict=True):
                known, limit = int(columns.known[row]), int(columns.limit[row])
                count = min(count, limit - known - 1)
                if count > 0:
                    tokens = columns.history[row, : known + count].tolist()
                    seen.append((tokens[:known], tokens[known:]))
        return result

    monkeypatch.setattr(runner.graphs, "run", recorded)


def at_once(target: Decoder, drafter: Any, tokens: list[int], count: int) -> list[int]:
    if isinstance(drafter, MedusaDrafter):
        from helpers.paged import make_batch
        from run.test_model_drafters import BLOCK, CONTEXT

        kv = [torch.zeros(target.spec.kv_shape(CONTEXT // BLOCK, BLOCK)) for _ in range(target.spec.num_layers)]
        batch = make_batch([(tokens[:-1], 0, list(range(1, CONTEXT // BLOCK)))], BLOCK)
        logits = drafter.logits(target.forward(batch, kv)[-1:])
        return [int(drafter.token_ids(own.argmax(-1))) for own in logits[:count]]
    return drafts_at_once(target, drafter, tokens, count)


@pytest.mark.skipif(not interpreted, reason="a GPU captures real graphs")
def test_what_drafts_is_warmed_up_with_the_bodies_that_have_places(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also in the dry run that finds kernels, whose decoder has fewer layers: the drafter computes every step too."""
    want_few_programs(monkeypatch)
    target = target_on(place, paged=True)
    drafter = drafter_with_paged_attention(eagle3(tmp_path, target))
    runner = CudaRunner(
        target, CpuDevice(1), RunnerSettings(token_budget=BUDGET, speculate="eagle", **SIZES), drafter=drafter
    )
    ran: list[object] = []
    # Records the graphs that a GPU would replay: tokens do not show them.
    monkeypatch.setattr(runner.graphs, "run", lambda key, work, captures: ran.append(key) or work())
    one, two = (runner.writer.shapes.decode(1, places=places) for places in (1, 2))
    with quick_interpreter(), torch.inference_mode():
        for part in (one, two):
            runner.warm_up.capture_part(part)
        assert set(ran) == {one, two, Accept(None), Accept(two), Propose(1, 2)}
        assert ran.index(Propose(1, 2)) < ran.index(two)
        did: list[str] = []
        for name in ("propose", "feed"):
            monkeypatch.setattr(runner.chain, name, lambda *_, name=name: did.append(name))
        runner.work.send(None, two)
        runner.warm_up.run_step(two, target.with_distinct_layers())
    assert did == ["propose", "feed"]


def test_states_are_kept_by_row_and_position() -> None:
    states = RowStates(4, 2, torch.float32, CPU)
    rows = torch.tensor([2, 1])

    def fed(starts: list[int], places: int) -> FedRows:
        return FedRows(torch.tensor(starts, dtype=torch.int32), places, None)

    def tiled(query_starts: list[int]) -> Any:
        class Rows:
            table_rows = torch.tensor([2, 1], dtype=torch.int32)

        own: Any = Rows()
        own.query_starts = torch.tensor(query_starts, dtype=torch.int32)
        return own

    values = torch.arange(8.0).view(4, 2)
    states.keep(tiled([0, 2, 4]), fed([5, 7], 2), values)
    assert states.at(rows, torch.tensor([6, 7])).tolist() == values[[1, 2]].tolist()
    assert states.at(rows, torch.tensor([4, 20])).abs().sum() == 0
    # A chunk of three tokens, and a single one: as many tokens as places, but ragged.
    states.keep(tiled([0, 3, 4]), fed([7, 9], 0), values)
    assert states.at(rows, torch.tensor([9, 9])).tolist() == values[[2, 3]].tolist()
    states.clear(torch.tensor([2]))
    assert states.at(rows, torch.tensor([9, 9])).tolist() == [[0, 0], values[3].tolist()]


class Heads(DeviceDrafter):
    """Drafts 100, 101 ... and has two heads."""

    max_drafts = 2

    def __init__(self, columns: Any) -> None:
        self._columns = columns

    def feed(self, batch: Any, fed: FedRows) -> None: ...

    def _draft(self, due: DueRows, states: torch.Tensor | None, place: int) -> tuple[torch.Tensor, None]:
        return torch.full((len(due.rows),), 100 + place), None


def test_a_drafter_fills_no_more_places_than_it_has_heads() -> None:
    """A shape may have more places than the rows of a step."""
    known, limit = torch.tensor([3, 3], dtype=torch.int32), torch.tensor([9, 5], dtype=torch.int32)
    columns = SimpleNamespace(known=known, limit=limit, history=torch.zeros((2, 10), dtype=torch.int32))
    Heads(columns).propose(torch.arange(2, dtype=torch.int32), torch.tensor([2, 2], dtype=torch.int32), 7)
    assert columns.history[0].tolist() == [0, 0, 0, 100, 101, 0, 0, 0, 0, 0]
    assert columns.history[1].tolist() == [0, 0, 0, 100, 0, 0, 0, 0, 0, 0], "one place before its limit"
