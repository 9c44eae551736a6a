"""Two processes release what one does; ranks that differ are found."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch.distributed as dist
import torch.multiprocessing as processes
import torch.nn.functional as F
from faults import FAULTS, noise_as
from test_planted_faults import SETTINGS

from pipeline.audit import check_ranks, rank_check
from pipeline.audit.pictures import canary_store
from pipeline.audit.step import AuditSettings
from pipeline.dpsgd import release


def test_two_processes_release_what_one_does() -> None:
    found = check_ranks(SETTINGS)
    assert found.passed, found.detail


def noise_of_the_rank(patch: pytest.MonkeyPatch, rank: int) -> None:
    """Noise from each rank's own position 0: the slices repeat each other."""
    noise_as(lambda draw, self, step, start, stop: draw(self, step, 0, stop - start))(patch)


def noise_of_all_ranks(patch: pytest.MonkeyPatch, rank: int) -> None:
    """Each rank adds noise to all it has before the sum: W draws a coordinate, or 1/sqrt(W)."""
    noise_as(lambda draw, *where: math.sqrt(2) * draw(*where))(patch)


def noise_on_the_first_rank(patch: pytest.MonkeyPatch, rank: int) -> None:
    """Only rank 0 adds noise, and only to its slice."""
    noise_as(lambda draw, *where: draw(*where) * (rank == 0))(patch)


def sums_not_reduced(patch: pytest.MonkeyPatch, rank: int) -> None:
    """Each rank releases its own share's sum: the other's images are lost."""

    def own_part(flat, group):  # type: ignore[no-untyped-def]
        start, stop = release.rank_slice(len(flat))
        return F.pad(flat[start:stop], (0, -(-len(flat) // 2) - (stop - start)))

    patch.setattr(release, "_reduce_scatter", own_part)


def by_name(fault: str) -> Callable[[pytest.MonkeyPatch, int], None]:
    return lambda patch, rank: FAULTS[fault](patch)


RANK_FAULTS: dict[str, Callable[[pytest.MonkeyPatch, int], None]] = {
    "noise by the rank's own positions": noise_of_the_rank,
    "noise once a rank": noise_of_all_ranks,
    "noise on the first rank alone": noise_on_the_first_rank,
    "sums that are not reduced": sums_not_reduced,
    "noise / W": by_name("noise / W"),
    "noise / sqrt(W)": by_name("noise / sqrt(W)"),
    "every rank reads the whole sample": by_name("every rank reads the whole sample"),
    "every rank reads the first one's share": by_name("every rank reads the first one's share"),
    "another key on every rank": lambda patch, rank: None,
}


def run_all(rank: int, folder: str, store_root: str, pinned: AuditSettings) -> None:
    """Every fault, one after the other, between the same two processes."""
    rank_check._meet(rank, folder)
    try:
        for number, (name, plant) in enumerate(RANK_FAULTS.items()):
            settings = replace(pinned, seed=rank) if name.startswith("another key") else pinned
            with pytest.MonkeyPatch.context() as patch:
                plant(patch, rank)
                found = rank_check._released(rank, store_root, settings)
            np.save(Path(folder) / f"{number}-{rank}.npy", found)
    finally:
        dist.destroy_process_group()


def test_ranks_that_differ_are_found(tmp_path: Path) -> None:
    pinned = rank_check._pinned(SETTINGS)
    root = canary_store(pinned.num_canaries)
    processes.spawn(run_all, (str(tmp_path), root, pinned), nprocs=2)
    missed = []
    for number, name in enumerate(RANK_FAULTS):
        found = [np.load(tmp_path / f"{number}-{rank}.npy") for rank in range(2)]
        if rank_check._compared(pinned, found).passed:
            missed.append(name)
    assert not missed
