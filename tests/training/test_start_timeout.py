"""A group that lost a node shrinks soon; one of fixed size waits for the autoscaler."""

from __future__ import annotations

import os
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from pipeline.training import workers
from pipeline.training.settings import PhaseSettings

NAME = "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S"


@pytest.mark.parametrize(
    ("group", "operator", "seen"),
    [((1, 2), None, "15"), (2, None, None), ((1, 2), "40", "40"), (2, "40", "40")],
)
def test_only_an_elastic_group_starts_with_the_short_timeout(
    settings: Callable[..., PhaseSettings],
    monkeypatch: pytest.MonkeyPatch,
    group: int | tuple[int, int],
    operator: str | None,
    seen: str | None,
) -> None:
    """Each fit sees it, and it is gone for a later phase of the same process."""
    monkeypatch.delenv(NAME, raising=False)
    if operator is not None:
        monkeypatch.setenv(NAME, operator)
    at_fit: list[str | None] = []

    def fit() -> None:
        at_fit.append(os.environ.get(NAME))
        raise RuntimeError("a worker was lost")

    monkeypatch.setattr(workers, "_trainer", lambda *_: SimpleNamespace(fit=fit))
    resources = {"workers": group, "device": "cpu", "max_failures": 1}
    made = settings("private", phase={"resources": resources})
    with pytest.raises(workers.PhaseFailed):
        workers.train_under_ray(made, lambda metrics: None)
    assert at_fit == [seen, seen]
    assert os.environ.get(NAME) == operator


def test_ray_takes_it_from_the_driver_to_the_process_that_starts_the_group() -> None:
    from ray.train.v2._internal import constants

    assert constants.WORKER_GROUP_START_TIMEOUT_S_ENV_VAR == workers._START_TIMEOUT == NAME
    assert NAME in constants.ENV_VARS_TO_PROPAGATE
