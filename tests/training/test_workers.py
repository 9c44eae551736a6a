"""A phase on Ray Train workers gives what it gives in one process."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from phase_fixtures import run

from pipeline.privacy.ledger import Ledger
from pipeline.storage import Location
from pipeline.training.checkpoint import Checkpoint, latest_checkpoint, load_checkpoint
from pipeline.training.metrics import PublicMetrics
from pipeline.training.settings import PhaseSettings

pytestmark = [pytest.mark.ray, pytest.mark.slow]
Make = Callable[..., PhaseSettings]


def final(settings: PhaseSettings) -> Checkpoint:
    latest = latest_checkpoint(Location(settings.output))
    assert latest is not None
    return load_checkpoint(latest)


def test_two_workers_equal_one_process(
    ray_local: None, settings: Make, public_set: str, tmp_path: Path
) -> None:
    """Same ids, noise, crops and masks at every step: the weights agree to float tolerance.

    One different record, crop, mask or noise value moves Adam's update by a good part of the
    learning rate, 1e-3; the order of fp32 sums moves it by less than 1e-5.
    """
    from pipeline.training.workers import train_under_ray

    pinned: dict[str, Any] = {"seed": 7, "dataset_root": public_set, "domain": "public-some"}
    alone = settings("private", run="alone", output=str(tmp_path / "alone"), **pinned)
    run(alone)
    resources = {"workers": 2, "device": "cpu", "data_cpus": 2}
    phase = {"resources": resources, "microbatch_size": 4}
    pair = settings("private", phase=phase, run="pair", output=str(tmp_path / "pair"), **pinned)
    shown: list[PublicMetrics] = []
    outcome = train_under_ray(pair, shown.append)
    assert (outcome.step, outcome.finished) == (6, "complete")
    assert [m.step for m in shown] == [2, 4, 6]
    left, right = final(alone).weights, final(pair).weights
    for name, value in left.items():
        torch.testing.assert_close(value, right[name], rtol=0, atol=1e-5, msg=name)
    assert pair.ledger_home
    ledger = Ledger(pair.ledger_home, "public-some")
    assert sum(n for _, n in ledger.spent_by("pair")) == 6


def dying_once(marker: Path) -> Callable[[dict[str, Any]], None]:
    """What a worker runs, but rank 1 is killed in step 3 of the first attempt."""

    def train_rank(config: dict[str, Any]) -> None:
        from pipeline.training import gradients, workers

        begin = gradients.PrivateGradients.begin_step

        def begin_or_die(self: gradients.PrivateGradients, step: int) -> None:
            import torch.distributed as dist

            if step == 3 and dist.get_rank() == 1 and not marker.exists():
                marker.touch()
                os.kill(os.getpid(), signal.SIGKILL)
            begin(self, step)

        gradients.PrivateGradients.begin_step = begin_or_die  # type: ignore[method-assign]
        workers._train_rank(config)

    return train_rank


def test_a_killed_worker_costs_its_reservation(
    ray_local: None, settings: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pipeline.training import workers

    marker = tmp_path / "died"
    monkeypatch.setattr(workers, "_train_rank", dying_once(marker))
    resources = {"workers": 2, "device": "cpu", "data_cpus": 2}
    made = settings("private", phase={"resources": resources, "microbatch_size": 4})
    outcome = workers.train_under_ray(made, lambda metrics: None)
    assert marker.exists()
    assert (outcome.step, outcome.finished) == (6, "complete")
    assert made.ledger_home and made.domain
    (account,) = Ledger(made.ledger_home, made.domain).verify().phases
    assert [attempt.first_step for attempt in account.attempts] == [0, 2]
    assert account.num_charged_steps == 8
