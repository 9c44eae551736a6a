"""What is accounted is what is sampled: one maker of events, one truth (PITFALLS 7)."""

import dataclasses
from pathlib import Path

import pytest

import pipeline
from pipeline.privacy.keys import AttemptKey
from pipeline.privacy.mechanism import Mechanism
from pipeline.privacy.sampling import PoissonPlan, ShufflePlan

MECHANISM = Mechanism(
    num_records=1_000,
    expected_batch_size=100,
    sampling_probability=0.1,
    noise_multiplier=1.5,
    max_grad_norm=0.1,
    num_steps=10,
    delta=1e-5,
)
KEY = AttemptKey.seeded(1).sampling_key()
IN_USE = {
    "plan": MECHANISM.plan(KEY),
    "sensitivity": 0.1,
    "noise_std": 1.5 * 0.1,
    "divisor": 100,
}


def test_event_comes_from_the_mechanism() -> None:
    event = MECHANISM.event()
    assert event.event.sampling_probability == MECHANISM.plan(KEY).sampling_probability
    assert event.event.event.noise_multiplier * 0.1 == MECHANISM.noise_std
    assert event.count == MECHANISM.max_charged_steps


def test_no_other_module_makes_events_of_steps() -> None:
    root = Path(pipeline.__file__).parent
    makers = {
        path.relative_to(root).as_posix()
        for path in root.rglob("*.py")
        for name in ("PoissonSampledDpEvent", "SelfComposedDpEvent", "MixtureOfGaussiansDpEvent")
        if name in path.read_text()
    }
    assert makers == {"privacy/mechanism.py"}


def test_no_second_truth() -> None:
    MECHANISM.require(**IN_USE)
    other_rate = PoissonPlan(key=KEY, num_records=1_000, sampling_probability=0.11)
    other_data = PoissonPlan(key=KEY, num_records=1_001, sampling_probability=0.1)
    for name, value, message in (
        ("plan", other_rate, "sampling_probability is 0.11"),
        ("plan", other_data, "num_records is 1001"),
        ("sensitivity", 0.2, "max_grad_norm is 0.2"),
        ("noise_std", 1.5, "noise_std is 1.5"),
        ("divisor", 97, "expected_batch_size is 97"),
    ):
        with pytest.raises(ValueError, match=message):
            MECHANISM.require(**{**IN_USE, name: value})


def test_shuffled_batches_cannot_pass_as_poisson() -> None:
    shuffled = ShufflePlan(key=KEY, num_records=1_000, batch_size=100)
    with pytest.raises(ValueError, match="ShufflePlan"):
        MECHANISM.require(**{**IN_USE, "plan": shuffled})
    for sampler in ("shuffle", "fixed_size", "truncated_poisson"):
        with pytest.raises(ValueError, match="sampler"):
            dataclasses.replace(MECHANISM, sampler=sampler)
