"""PITFALLS 7: what a phase uses is what its Mechanism promises, or it does not start."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from phase_fixtures import run

from pipeline.dpsgd.clipping import FlatClipping
from pipeline.privacy.mechanism import BrokenPromise
from pipeline.training import gradients
from pipeline.training.settings import PhaseSettings

Make = Callable[..., PhaseSettings]


def test_the_honest_phase_starts(settings: Make) -> None:
    run(settings("private"))


def test_another_clip_is_refused(settings: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gradients, "make_clipping", lambda *_: FlatClipping(2.0))
    with pytest.raises(ValueError, match="max_grad_norm is 2"):
        run(settings("private"))


def test_another_divisor_is_refused(settings: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PhaseSettings, "batch_size", 25)
    with pytest.raises(ValueError, match="expected_batch_size is 25"):
        run(settings("private"))


@pytest.mark.parametrize(
    "fault", [{"noise_std": 0.5}, {"divisor": 23.0}], ids=["half the noise", "realised count"]
)
def test_a_release_with_other_numbers_differs_from_the_promise(
    settings: Make, monkeypatch: pytest.MonkeyPatch, fault: dict[str, Any]
) -> None:
    """The release states its noise per coordinate; the loop compares it with the mechanism."""
    original = gradients.release_gradient

    def faulty(*args: Any, **kwargs: Any) -> Any:
        return original(*args, **(kwargs | fault))

    monkeypatch.setattr(gradients, "release_gradient", faulty)
    with pytest.raises(BrokenPromise, match="does not carry the noise"):
        run(settings("private"))


def test_n_of_another_manifest_is_refused(settings: Make) -> None:
    made = settings("private")
    assert made.mechanism is not None
    other = replace(made.mechanism, num_records=240, sampling_probability=0.1)
    with pytest.raises(ValueError, match="plan again"):
        run(replace(made, mechanism=other))
