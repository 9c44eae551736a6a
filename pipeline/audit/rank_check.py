"""Two processes, each with its share of a step, release what one process does."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as processes

from pipeline.audit.checks import CheckResult
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
    pinned = replace(settings, seed=settings.seed or 0, world_size=_WORLD_SIZE)
    alone = observe(pinned, num_steps=_NUM_STEPS).released
    with tempfile.TemporaryDirectory(prefix="dp-pretrain-audit-") as folder:
        try:
            processes.spawn(_run_rank, (folder, pinned), nprocs=_WORLD_SIZE)
            found = [np.load(Path(folder) / f"{rank}.npy") for rank in range(_WORLD_SIZE)]
        except Exception as error:
            detail = f"raised {type(error).__name__}"
            return CheckResult(name="ranks", passed=False, p_value=None, detail=detail)
    worst = max(float(np.abs(released - np.array(alone)).max()) for released in found)
    worst /= settings.mechanism.max_grad_norm
    return CheckResult(
        name="ranks",
        passed=worst <= _ROUNDING,
        p_value=None,
        detail=f"{_WORLD_SIZE} processes, largest difference {worst:.2g} of max_grad_norm",
    )


def _run_rank(rank: int, folder: str, settings: AuditSettings) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=_WORLD_SIZE
    )
    try:
        released = observe(settings, num_steps=_NUM_STEPS, rank=rank).released
        np.save(Path(folder) / f"{rank}.npy", np.array(released))
    finally:
        dist.destroy_process_group()
