"""One phase under Ray Train: the same loop on W ranks, fed by one Ray Data pipeline."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import ray
import ray.train
import ray.train.torch
from ray.train.collective import broadcast_from_rank_zero

from pipeline.data.shards import StorageFault
from pipeline.data.stream import (
    DeliveryError,
    StreamConfig,
    Unit,
    ray_unit_iterators,
    units_from_iterator,
)
from pipeline.recipe import Resources
from pipeline.storage import Location
from pipeline.training.checkpoint import (
    CheckpointError,
    latest_checkpoint,
    load_checkpoint,
    read_facts,
)
from pipeline.training.metrics import PublicMetrics
from pipeline.training.phase import PhaseOutcome, run_phase
from pipeline.training.ranks import Ranks
from pipeline.training.settings import PhaseSettings

_POLL_SECONDS = 1.0
_NEVER_SECONDS = 1e9

# An elastic group asks only for nodes that Ray believes are there, and has them within seconds.
# After a lost node that belief is stale, and Ray's own 60 s are most of what shrinking takes.
_START_TIMEOUT = "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S"
_ELASTIC_START_SECONDS = 15

# What a new attempt would only meet again, at the price of another reservation. Their messages are
# written for people and name nothing private. (LedgerError and CheckpointError are ValueErrors.)
_FINAL = (StorageFault, DeliveryError, ValueError)


class PhaseFailed(RuntimeError):
    """The workers could not finish a phase; what is charged stays charged."""


def train_under_ray(
    settings: PhaseSettings, on_window: Callable[[PublicMetrics], None]
) -> PhaseOutcome:
    """Train a phase on the Ray cluster this process is connected to.

    A lost worker group is started anew from the last checkpoint with a new attempt, at most
    `max_failures` times. What a new attempt would only meet again (a storage fault, a fenced or
    full ledger, data that does not fit) is not retried: each retry costs reserve steps.

    Raises:
        PhaseFailed: with the reason.
    """
    folder = Location(settings.output)
    failure = folder / "failure.json"
    failure.delete()
    with _Follower(folder, on_window):
        for number in range(settings.phase.resources.max_failures + 1):
            try:
                with _start_timeout(settings.phase.resources):
                    _trainer(settings, number).fit()
                break
            except Exception as error:
                reason = _reason(failure) or f"a worker was lost ({type(error).__name__})"
                is_final = failure.exists()
            if is_final or number == settings.phase.resources.max_failures:
                raise PhaseFailed(
                    f"phase {settings.phase.name} stopped: {reason}. What was charged stays "
                    "charged; the same command resumes from the last checkpoint"
                )
    latest = latest_checkpoint(folder)
    if latest is None:
        raise PhaseFailed(f"phase {settings.phase.name} ended without a checkpoint in {folder}")
    saved = load_checkpoint(latest)
    if saved.facts.finished is None:
        raise PhaseFailed(f"phase {settings.phase.name} stopped at step {saved.facts.step}")
    return PhaseOutcome(
        step=saved.facts.step,
        finished=saved.facts.finished,
        weights_digest=saved.weights_digest,
    )


def _trainer(settings: PhaseSettings, number: int) -> ray.train.torch.TorchTrainer:
    resources = settings.phase.resources
    return ray.train.torch.TorchTrainer(
        _train_rank,
        train_loop_config={"settings": settings.to_json()},
        scaling_config=_scaling(resources),
        torch_config=ray.train.torch.TorchConfig(
            backend="nccl" if resources.gpus_per_worker else "gloo"
        ),
        run_config=ray.train.RunConfig(
            name=f"{settings.run}-{settings.phase.name}-{number}",
            storage_path=str(Location(settings.output) / "ray"),
            failure_config=ray.train.FailureConfig(max_failures=0),
        ),
    )


def _train_rank(config: dict[str, Any]) -> None:
    """What each worker runs."""
    settings = PhaseSettings.from_json(config["settings"])
    ranks = Ranks(ray.train.torch.get_device())

    def open_units(stream: StreamConfig) -> Iterator[Unit]:
        iterators = None
        if ranks.rank == 0:
            iterators = ray_unit_iterators(stream, num_cpus=settings.phase.resources.data_cpus)
        shared = broadcast_from_rank_zero(iterators)
        return units_from_iterator(shared[ranks.rank], stream, ranks.rank)

    try:
        run_phase(settings, ranks, open_units, on_window=lambda metrics: None)
    except _FINAL as error:
        reason = {"reason": str(error)}
        (Location(settings.output) / "failure.json").write_text(json.dumps(reason))
        raise


def _reason(failure: Location) -> str | None:
    return json.loads(failure.read_text())["reason"] if failure.exists() else None


def _scaling(resources: Resources) -> ray.train.ScalingConfig:
    workers: Any = resources.workers  # a (min, max) pair makes the group elastic
    if isinstance(workers, tuple) and workers[0] == workers[1]:
        workers = workers[0]
    per_worker: dict[str, float] = {"CPU": resources.cpus_per_worker or 1}
    if resources.gpus_per_worker:
        per_worker["GPU"] = resources.gpus_per_worker
    fields: dict[str, Any] = {
        "num_workers": workers,
        "use_gpu": bool(resources.gpus_per_worker),
        "resources_per_worker": per_worker,
        # Ray's own growth stops a running group without a checkpoint, and the steps it was
        # charged for are lost.
        "elastic_resize_monitor_interval_s": _NEVER_SECONDS,
    }
    return ray.train.ScalingConfig(**fields)


@contextmanager
def _start_timeout(resources: Resources) -> Iterator[None]:
    """How long an elastic group waits for its nodes before it is planned anew, smaller.

    A group of fixed size may wait for the autoscaler, so Ray's own value holds for it; what the
    operator has set holds for both.
    """
    if not isinstance(resources.workers, tuple) or _START_TIMEOUT in os.environ:
        yield
        return
    os.environ[_START_TIMEOUT] = str(_ELASTIC_START_SECONDS)
    try:
        yield
    finally:
        del os.environ[_START_TIMEOUT]


class _Follower:
    """Tells of each new checkpoint in storage while the workers train."""

    def __init__(self, folder: Location, on_window: Callable[[PublicMetrics], None]) -> None:
        self._folder, self._on_window = folder, on_window
        self._told = -1
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._follow, daemon=True)

    def __enter__(self) -> _Follower:
        self._tell(silently=True)
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stop.set()
        self._thread.join()
        self._tell()

    def _follow(self) -> None:
        while not self._stop.wait(_POLL_SECONDS):
            self._tell()

    def _tell(self, *, silently: bool = False) -> None:
        try:
            latest = latest_checkpoint(self._folder)
            history = read_facts(latest).history if latest is not None else []
        except (CheckpointError, OSError):  # it is being pruned just now
            return
        for line in history:
            if line["step"] > self._told:
                self._told = line["step"]
                if not silently:
                    self._on_window(PublicMetrics(**line))
