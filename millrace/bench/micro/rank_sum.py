"""How long a sum over ranks takes: `python -m millrace.bench.micro.rank_sum --ranks 2 --numbers 576,294912`.

Processes add float32 numbers over our shared memory and, to compare, with gloo of torch.distributed. A model has two
sums per layer, of as many numbers as tokens of the step times its hidden size.
"""

from __future__ import annotations

import argparse
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from millrace.run.ranks.shared_mesh import MeshLink, SharedMesh, make_links

WARM_UP_ROUNDS = 20
MODULE = "millrace.bench.micro.rank_sum"
Carrier = Literal["mesh", "gloo"]


def median_us(add: Callable[[Tensor], object], num_numbers: int, rounds: int) -> float:
    times = []
    for _ in range(WARM_UP_ROUNDS + rounds):
        x = torch.ones(num_numbers)
        began = time.perf_counter()
        add(x)
        times.append(1e6 * (time.perf_counter() - began))
    return statistics.median(times[WARM_UP_ROUNDS:])


def measure(carrier: Carrier, num_ranks: int, num_numbers: int, rounds: int) -> float:
    """Microseconds, as rank 0 measures them."""
    links = make_links(num_ranks)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    base = [sys.executable, "-m", MODULE, "--carrier", carrier, "--numbers", str(num_numbers), "--rounds", str(rounds)]
    others = []
    for link in links[1:]:
        fds = link.fds()
        words = ["--rank", str(link.rank), "--ranks", str(num_ranks), "--port", str(port), "--fds", *map(str, fds)]
        others.append(subprocess.Popen([*base, *words], pass_fds=fds))
        link.close()
    try:
        return _run(carrier, links[0], num_numbers, rounds, port)
    finally:
        for other in others:
            other.wait(60)


def _run(carrier: Carrier, link: MeshLink, num_numbers: int, rounds: int, port: int) -> float:
    torch.set_num_threads(1)
    if carrier == "mesh":
        mesh = SharedMesh(link)
        mesh.beat()
        try:
            found = median_us(mesh.sum, num_numbers, rounds)
            mesh.step(lambda: None)  # All have ended.
            return found
        finally:
            mesh.close()
    import torch.distributed as dist  # slow to import

    address = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", init_method=address, rank=link.rank, world_size=link.size)
    try:
        return median_us(dist.all_reduce, num_numbers, rounds)
    finally:
        dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description="Time of a sum over ranks.")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=300)
    parser.add_argument("--numbers", default="576,4608,294912", help="how many, separated by commas")
    parser.add_argument("--carrier", choices=("mesh", "gloo"), default="mesh", help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--fds", nargs="*", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.fds:
        link = MeshLink.from_fds(args.rank, args.fds[0], args.fds[1:])
        _run(args.carrier, link, int(args.numbers), args.rounds, args.port)
        return
    for size in map(int, args.numbers.split(",")):
        mesh, gloo = (measure(carrier, args.ranks, size, args.rounds) for carrier in ("mesh", "gloo"))
        print(f"{size:>8} numbers, {args.ranks} ranks: median {mesh:8.1f} us, gloo {gloo:8.1f} us")


if __name__ == "__main__":
    main()
