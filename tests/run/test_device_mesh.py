"""The mesh of GPU ranks: sums through a process group, gathers as sums, and the loss of a rank, on a CPU."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial

import pytest
import torch
from helpers.served import wait_until
from torch import Tensor, distributed

from millrace.run.ranks.device_mesh import DeviceMesh, GroupCarrier
from millrace.run.ranks.shared_mesh import RankLost, make_links

CPU = torch.device("cpu")


class Alone:
    """A carrier that nobody uses."""

    is_aborted = is_released = False

    def sum(self, own: Tensor) -> Tensor:
        return own

    def abort(self) -> None:
        self.is_aborted = True

    def release(self) -> None:
        self.is_released = True


@contextmanager
def alone(size: int) -> Iterator[tuple[list[DeviceMesh], list[Alone]]]:
    carriers = [Alone() for _ in range(size)]
    links = zip(make_links(size), carriers, strict=True)
    meshes = [DeviceMesh(link, CPU, lambda _, own=carrier: own) for link, carrier in links]  # type: ignore[misc]
    for mesh in meshes:
        mesh.beat()
    yield meshes, carriers
    for mesh in meshes:
        mesh.close()


@pytest.mark.live
def test_ranks_sum_and_gather_through_a_group() -> None:
    """Gloo takes the place of NCCL."""
    meshes = [DeviceMesh(link, CPU, partial(GroupCarrier, distributed.ProcessGroupGloo)) for link in make_links(2)]

    def run(mesh: DeviceMesh) -> tuple[Tensor, Tensor]:
        own = mesh.rank + 1.0
        return mesh.sum(torch.full((3, 2), own)), mesh.gather(torch.full((2, 1 + mesh.rank), own), (1, 2))

    try:
        with ThreadPoolExecutor(2) as pool:
            for found in [pool.submit(run, mesh) for mesh in meshes]:
                total, gathered = found.result(60)
                assert total.tolist() == [[3.0, 3.0]] * 3
                assert gathered.tolist() == [[1.0, 2.0, 2.0]] * 2
    finally:
        for mesh in meshes:
            mesh.close()


def test_a_rank_that_ends_is_noticed_by_all_and_ends_their_sums() -> None:
    with alone(3) as (meshes, carriers):
        meshes[2].close()
        for mesh, carrier in zip(meshes[:2], carriers, strict=False):
            wait_until(lambda own=carrier: own.is_aborted, "the rank's end")  # type: ignore[misc]
            with pytest.raises(RankLost, match=r"has ended\.$"):
                mesh.check()
            with pytest.raises(RankLost):
                mesh.step(lambda: None)


def test_what_a_mesh_holds_is_given_back_when_no_step_can_follow() -> None:
    with alone(2) as (meshes, carriers):
        meshes[0].close()
        assert not carriers[0].is_released
        meshes[0].release()
        assert [carrier.is_released for carrier in carriers] == [True, False]


def test_ranks_that_are_there_compute() -> None:
    with alone(2) as (meshes, _):
        for mesh in meshes:
            mesh.check()
            assert mesh.step(lambda: 3) == 3
            assert mesh.lost == ""
