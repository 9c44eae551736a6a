"""Membership inference: chance for equal laws, the known AUC for shifted ones."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from pipeline.audit.membership import membership_inference


def test_equal_laws_give_chance() -> None:
    random = np.random.default_rng(0)
    scores = membership_inference(random.normal(size=(2000, 3)), random.normal(size=(2000, 3)))
    for name in ("accuracy", "auc"):
        low, high = scores.intervals[name]
        assert low < 0.5 < high and abs(getattr(scores, name) - 0.5) < 0.04
    assert scores.num_scored == 2000


def test_shifted_laws_give_their_auc() -> None:
    """Two normals a apart: AUC = Phi(a / sqrt 2), accuracy = Phi(a / 2)."""
    random = np.random.default_rng(1)
    members, others = random.normal(1.5, 1, (4000, 1)), random.normal(0, 1, (5000, 1))
    scores = membership_inference(members, others)
    assert scores.auc == pytest.approx(stats.norm.cdf(1.5 / math.sqrt(2)), abs=0.02)
    for name in ("accuracy", "precision", "recall", "f1"):
        assert getattr(scores, name) == pytest.approx(stats.norm.cdf(0.75), abs=0.03)
        low, high = scores.intervals[name]
        assert low <= getattr(scores, name) <= high


def test_shapes_are_checked() -> None:
    with pytest.raises(ValueError, match="with the same F"):
        membership_inference(np.zeros((9, 2)), np.zeros((9, 3)))


def test_a_model_that_remembers_its_images_is_told() -> None:
    """Members whose loss is far lower, as an overfitted model's are."""
    random = np.random.default_rng(5)
    others = random.normal(0, 1, (200, 4))
    members = random.normal(-4, 1, (200, 4))
    scores = membership_inference(members, others)
    assert scores.auc > 0.99 and scores.intervals["auc"][0] > 0.97
