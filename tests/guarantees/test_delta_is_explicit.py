"""delta is given, or 1 / (2N) asked for by name; never a hidden default (PITFALLS 24)."""

import pytest

from pipeline.privacy.mechanism import Mechanism, default_delta

FIELDS = {
    "num_records": 1_000,
    "expected_batch_size": 100,
    "sampling_probability": 0.1,
    "max_grad_norm": 1.0,
    "num_steps": 10,
}


def test_delta_is_explicit() -> None:
    with pytest.raises(TypeError, match="delta"):
        Mechanism(**FIELDS, noise_multiplier=1.0)
    with pytest.raises(TypeError, match="delta"):
        Mechanism.calibrate(**FIELDS, target_epsilon=8.0)


def test_default_delta_is_half_of_one_over_n() -> None:
    assert default_delta(233_000_000) == pytest.approx(2.1459e-9, rel=1e-4)


def test_unknown_options_are_not_swallowed() -> None:
    with pytest.raises(TypeError, match="sample_rate"):
        Mechanism(**FIELDS, noise_multiplier=1.0, delta=1e-5, sample_rate=0.1)
    with pytest.raises(TypeError, match="sample_rate"):
        Mechanism.calibrate(**FIELDS, target_epsilon=8.0, delta=1e-5, sample_rate=0.1)
