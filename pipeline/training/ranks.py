"""The processes that train one phase together: who am I, and how do we agree."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

T = TypeVar("T")


class FirstRankFailed(RuntimeError):
    """Rank 0 failed at something that it does for all."""


class Ranks:
    """The training processes; one process needs no process group.

    Args:
        device: where this rank computes.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        is_group = dist.is_available() and dist.is_initialized()
        self.rank = dist.get_rank() if is_group else 0
        self.world_size = dist.get_world_size() if is_group else 1

    def from_first(self, value: Any) -> Any:
        """Rank 0's value on every rank, sent in memory only."""
        if self.world_size == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0, device=self.device)
        return box[0]

    def sum_int64(self, values: Tensor) -> Tensor:
        """Elementwise sum over the ranks, modulo 2**64."""
        if self.world_size == 1:
            return values
        total = values.to(self.device)
        dist.all_reduce(total)
        return total.cpu()

    def first_does(self, action: Callable[[], T]) -> T | None:
        """Let rank 0 do something; if it fails, every rank stops.

        Returns:
            The action's result on rank 0, None on the others.

        Raises:
            FirstRankFailed: on the other ranks; rank 0 raises what the action raised.
        """
        result, failure = None, None
        if self.rank == 0:
            try:
                result = action()
            except Exception as error:
                failure = error
        has_failed = self.from_first(failure is not None)
        if failure is not None:
            raise failure
        if has_failed:
            raise FirstRankFailed("rank 0 could not go on, so this rank stops too")
        return result


def choose_device(wanted: str) -> torch.device:
    """The device of a phase without Ray workers. Raises ValueError if there is no such device."""
    if wanted == "cuda" and not torch.cuda.is_available():
        raise ValueError("resources.device is cuda and this machine has no CUDA device: set cpu")
    use_cuda = wanted != "cpu" and torch.cuda.is_available()
    return torch.device("cuda" if use_cuda else "cpu")
