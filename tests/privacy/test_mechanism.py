"""The Mechanism: strict, hashable, and the only source of events."""

import dataclasses
import math

import dp_accounting
import numpy as np
import pytest

from pipeline.privacy.keys import AttemptKey
from pipeline.privacy.mechanism import Mechanism, default_delta, default_reserve_steps

MECHANISM = Mechanism(
    num_records=60_000,
    expected_batch_size=2_048,
    sampling_probability=2_048 / 60_000,
    noise_multiplier=0.656,
    max_grad_norm=0.1,
    num_steps=150,
    reserve_steps=8,
    delta=1e-5,
)
KEY = AttemptKey.seeded(1).sampling_key()


def test_derived_numbers() -> None:
    assert MECHANISM.noise_std == 0.656 * 0.1
    assert MECHANISM.max_charged_steps == 158
    assert default_delta(233_000_000) == 1 / 466_000_000
    assert default_reserve_steps(6_000, 20) == 120
    assert default_reserve_steps(6_000, 100) == 400
    assert default_reserve_steps(50, 1) == 4


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sampler": "shuffle"}, "sampler is shuffle"),
        ({"adjacency": "replace_one"}, "adjacency"),
        ({"privacy_unit": "image"}, "privacy_unit"),
        ({"privacy_unit": "group_of_1"}, "privacy_unit"),
        ({"privacy_unit": "group_of_04"}, "privacy_unit"),
        ({"privacy_unit": "group_of_1000"}, "privacy_unit"),
        ({"noise_multiplier": 0.0}, "noise_multiplier"),
        ({"noise_multiplier": math.nan}, "noise_multiplier"),
        ({"noise_multiplier": math.inf}, "noise_multiplier"),
        ({"noise_multiplier": "1"}, "noise_multiplier"),
        ({"max_grad_norm": -1.0}, "max_grad_norm"),
        ({"max_grad_norm": math.inf}, "max_grad_norm"),
        ({"num_steps": 0}, "num_steps"),
        ({"num_steps": 10.0}, "num_steps"),
        ({"num_steps": True}, "num_steps"),
        ({"reserve_steps": -1}, "reserve_steps"),
        ({"delta": 0.0}, "delta"),
        ({"delta": 1.0}, "delta"),
        ({"delta": math.nan}, "delta"),
        ({"expected_batch_size": 0}, "expected_batch_size"),
        ({"num_records": 2_000}, "num_records is 2000; it must be >= expected_batch_size"),
        ({"num_records": None}, "num_records"),
        ({"sampling_probability": 0.0}, "sampling_probability"),
        ({"sampling_probability": 1.5}, "sampling_probability"),
        ({"sampling_probability": 0.03}, "expected_batch_size / num_records"),
        ({"adjacency": "add_or_remove_one"}, "N is private"),
    ],
)
def test_impossible_fields_are_refused(changes: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(MECHANISM, **changes)


def test_json_round_trip_is_strict() -> None:
    record = MECHANISM.to_json()
    assert Mechanism.from_json(record) == MECHANISM
    with pytest.raises(ValueError, match="unknown: sigma"):
        Mechanism.from_json({**record, "sigma": 1.0})
    del record["reserve_steps"]
    with pytest.raises(ValueError, match="missing or unknown: reserve_steps"):
        Mechanism.from_json(record)


def test_digest_covers_every_field() -> None:
    changes = {
        "num_records": 60_001,
        "expected_batch_size": 2_049,
        "sampling_probability": 0.5,
        "noise_multiplier": 0.657,
        "max_grad_norm": 0.2,
        "num_steps": 151,
        "reserve_steps": 9,
        "delta": 2e-5,
        "adjacency": "add_or_remove_one",
        "privacy_unit": "group_of_2",
        "sampler": "other",
    }
    assert set(changes) == {f.name for f in dataclasses.fields(Mechanism)}
    digests = {MECHANISM.digest()}
    for name, value in changes.items():
        changed = dataclasses.replace(MECHANISM)
        object.__setattr__(changed, name, value)  # past validation: only the digest matters
        digests.add(changed.digest())
    assert len(digests) == len(changes) + 1
    assert Mechanism.from_json(MECHANISM.to_json()).digest() == MECHANISM.digest()


def test_number_of_records_is_kept_out_under_add_or_remove_one() -> None:
    private_n = dataclasses.replace(MECHANISM, adjacency="add_or_remove_one", num_records=None)
    assert "60000" not in str(private_n.to_json())
    plan = private_n.plan(KEY, num_records=60_000)
    np.testing.assert_array_equal(plan.record_ids(0), MECHANISM.plan(KEY).record_ids(0))
    with pytest.raises(ValueError, match="num_records must be given"):
        private_n.plan(KEY)
    with pytest.raises(ValueError) as error:
        dataclasses.replace(private_n, num_records=61_234)
    assert "61234" not in str(error.value)


def test_events() -> None:
    step = dp_accounting.PoissonSampledDpEvent(2_048 / 60_000, dp_accounting.GaussianDpEvent(0.656))
    assert MECHANISM.event() == dp_accounting.SelfComposedDpEvent(step, 158)
    assert MECHANISM.event(3) == dp_accounting.SelfComposedDpEvent(step, 3)
    assert MECHANISM.event(0) == dp_accounting.NoOpDpEvent()
    with pytest.raises(ValueError, match="num_steps"):
        MECHANISM.event(-1)
    full = dataclasses.replace(MECHANISM, expected_batch_size=60_000, sampling_probability=1.0)
    assert full.event(2) == dp_accounting.SelfComposedDpEvent(
        dp_accounting.GaussianDpEvent(0.656), 2
    )


def test_plan_of_another_dataset_is_refused() -> None:
    with pytest.raises(ValueError, match="calibrated for"):
        MECHANISM.plan(KEY, num_records=60_001)


def test_calibrate_needs_a_rate() -> None:
    with pytest.raises(ValueError, match="sampling_probability must be given"):
        Mechanism.calibrate(
            target_epsilon=8.0,
            num_records=None,
            expected_batch_size=8,
            max_grad_norm=1.0,
            num_steps=1,
            delta=1e-5,
            adjacency="add_or_remove_one",
        )
