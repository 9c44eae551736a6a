"""Two processes, each with its share of a step, release what one process does."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
import torch.multiprocessing as processes

from pipeline.audit.checks import CheckResult
from pipeline.audit.pictures import canary_store
from pipeline.audit.step import AuditSettings, observe

_WORLD_SIZE, _NUM_STEPS = 2, 2
_ROUNDING = 1e-5


def check_ranks(settings: AuditSettings) -> CheckResult:
    """Runs two steps on two gloo processes and in this one, with the same pinned attempt.

    The release of the two is a reduce-scatter, noise by absolute coordinate and an all-gather; that
    of one process is none of these.

    Guarantees:
        1. Noise that depends on the rank, and shares that are added twice or not at all, are found
           (test_ranks_that_differ_are_found).
    """
    pinned = _pinned(settings)
    with tempfile.TemporaryDirectory(prefix="dp-pretrain-audit-") as folder:
        try:
            root = canary_store(settings.num_canaries)
            processes.spawn(_run_rank, (folder, root, pinned), nprocs=_WORLD_SIZE)
            found = [np.load(Path(folder) / f"{rank}.npy") for rank in range(_WORLD_SIZE)]
        except Exception as error:
            detail = f"raised {type(error).__name__}"
            return CheckResult(name="ranks", passed=False, p_value=None, detail=detail)
    return _compared(pinned, found)


def _pinned(settings: AuditSettings) -> AuditSettings:
    """The same attempt on every rank."""
    return replace(settings, seed=settings.seed or 0, world_size=_WORLD_SIZE)


def _compared(pinned: AuditSettings, found: Sequence[npt.NDArray[np.float64]]) -> CheckResult:
    """What the ranks released, against what this process releases alone."""
    alone = np.array(observe(pinned, num_steps=_NUM_STEPS).released)
    worst = max(float(np.abs(released - alone).max()) for released in found)
    worst /= pinned.mechanism.max_grad_norm
    return CheckResult(
        name="ranks",
        passed=worst <= _ROUNDING,
        p_value=None,
        detail=f"{_WORLD_SIZE} processes, largest difference {worst:.2g} of max_grad_norm",
    )


def _run_rank(rank: int, folder: str, store_root: str, pinned: AuditSettings) -> None:
    _meet(rank, folder)
    try:
        np.save(Path(folder) / f"{rank}.npy", _released(rank, store_root, pinned))
    finally:
        dist.destroy_process_group()


def _meet(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=_WORLD_SIZE
    )


def _released(rank: int, store_root: str, pinned: AuditSettings) -> npt.NDArray[np.float64]:
    """What this rank releases, by step."""
    seen = observe(pinned, num_steps=_NUM_STEPS, rank=rank, store_root=store_root)
    return np.array(seen.released)
