"""Several gloo processes of one test."""

from __future__ import annotations

import multiprocessing
import socket
from collections.abc import Callable
from typing import Any

import torch


def run_ranks(world_size: int, main: Callable[..., None], *given: Any) -> None:
    """Run `main(rank, world_size, *given)` as every rank of a process group of its own."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = multiprocessing.get_context("forkserver")  # imports torch once for all ranks
    context.set_forkserver_preload(["torch"])
    ranks = [
        context.Process(target=_main, args=(rank, world_size, port, main, given))
        for rank in range(world_size)
    ]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(timeout=120)
        process.kill()
    assert [process.exitcode for process in ranks] == [0] * world_size


def _main(
    rank: int, world_size: int, port: int, main: Callable[..., None], given: tuple[Any, ...]
) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=world_size
    )
    main(rank, world_size, *given)
    torch.distributed.destroy_process_group()


def exact_shares(total: torch.Tensor, rank: int, world_size: int) -> torch.Tensor:
    """A rank's share of a sum whose fp32 additions round nothing, in whatever order they come.

    `total` holds small multiples of 2^-10, and so does every share.
    """
    generator = torch.Generator().manual_seed(17)
    shape = (world_size - 1, len(total))
    shares = torch.randint(-(2**10), 2**10, shape, generator=generator) / 2.0**10
    return torch.cat([shares, (total - shares.sum(0))[None]])[rank].float()


def exact_total(num_coordinates: int, step: int) -> torch.Tensor:
    """Multiples of 2^-10 between -1 and 1."""
    generator = torch.Generator().manual_seed(100 + step)
    return torch.randint(-(2**10), 2**10, (num_coordinates,), generator=generator) / 2.0**10
