"""Membership inference: can a classifier tell members from others by what the model makes of them?

Source: arXiv 2402.18752, section 5 (accuracy, precision, recall, F1, AUC; .5 is chance).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy import optimize, special, stats

Interval = tuple[float, float]


@dataclass(frozen=True, kw_only=True)
class MembershipScores:
    """How well membership is told on images that the classifier was not fitted on.

    Args:
        accuracy, precision, recall, f1, auc: at equal numbers of members and others; each has a
            95 % interval in `intervals` (bootstrap over the scored images).
        num_scored: images scored.
    """

    accuracy: float
    precision: float
    recall: float
    f1: float
    auc: float
    intervals: dict[str, Interval]
    num_scored: int


def membership_inference(
    members_NF: npt.NDArray[np.float64],
    others_NF: npt.NDArray[np.float64],
    *,
    seed: int = 0,
    num_resamples: int = 500,
) -> MembershipScores:
    """Fit a logistic classifier on half of the images, score it on the other half.

    Args:
        members_NF: features (losses, logits) of images that were trained on, [N, F].
        others_NF: of images that were not, [N', F]; the larger set is cut to the smaller's size.
        seed: of the halves and the bootstrap.

    Raises:
        ValueError: fewer than four images of a kind, or different features.
    """
    random = np.random.default_rng(seed)
    num = min(len(members_NF), len(others_NF))
    if num < 4 or members_NF.ndim != 2 or members_NF.shape[1:] != others_NF.shape[1:]:
        raise ValueError(
            f"members have shape {members_NF.shape} and others {others_NF.shape}: allowed are "
            "[N, F] with the same F and four or more of each"
        )
    halves = []
    for features in (members_NF, others_NF):
        chosen = features[random.permutation(len(features))[:num]]
        halves.append((chosen[: num // 2], chosen[num // 2 :]))
    fit = np.concatenate([halves[0][0], halves[1][0]])
    score = np.concatenate([halves[0][1], halves[1][1]])
    fit_labels = np.repeat([1.0, 0.0], [len(halves[0][0]), len(halves[1][0])])
    labels = np.repeat([True, False], [len(halves[0][1]), len(halves[1][1])])
    centre, spread = fit.mean(0), fit.std(0) + 1e-12
    logits = _fitted((fit - centre) / spread, fit_labels)((score - centre) / spread)
    found = _measures(logits, labels)
    samples = []
    for _ in range(num_resamples):
        rows = random.integers(0, len(labels), len(labels))
        if labels[rows].any() and not labels[rows].all():
            samples.append(_measures(logits[rows], labels[rows]))
    intervals = {
        name: (
            float(np.quantile([s[name] for s in samples], 0.025)),
            float(np.quantile([s[name] for s in samples], 0.975)),
        )
        for name in found
    }
    return MembershipScores(**found, intervals=intervals, num_scored=len(labels))


class _Logits:
    """x -> w x + b."""

    def __init__(self, weights: npt.NDArray[np.float64]) -> None:
        self._weights = weights

    def __call__(self, rows: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        return rows @ self._weights[:-1] + self._weights[-1]


def _fitted(rows: npt.NDArray[np.float64], labels: npt.NDArray[np.float64]) -> _Logits:
    """Logistic regression with a light penalty."""
    augmented = np.concatenate([rows, np.ones((len(rows), 1))], 1)

    def loss(weights: npt.NDArray[np.float64]) -> tuple[float, npt.NDArray[np.float64]]:
        logits = augmented @ weights
        value = np.logaddexp(0, logits).mean() - (labels * logits).mean()
        slope = augmented.T @ (special.expit(logits) - labels) / len(labels)
        return float(value + 5e-4 * weights @ weights), slope + 1e-3 * weights

    start = np.zeros(augmented.shape[1])
    return _Logits(optimize.minimize(loss, start, jac=True, method="L-BFGS-B").x)


def _measures(logits: npt.NDArray[np.float64], labels: npt.NDArray[np.bool_]) -> dict[str, float]:
    told = logits > 0
    right = float((told & labels).sum())
    precision = right / max(float(told.sum()), 1.0)
    recall = right / max(float(labels.sum()), 1.0)
    ranks = stats.rankdata(logits)
    members, others = int(labels.sum()), int((~labels).sum())
    auc = (ranks[labels].sum() - members * (members + 1) / 2) / (members * others)
    return {
        "accuracy": float((told == labels).mean()),
        "precision": precision,
        "recall": recall,
        "f1": 2 * precision * recall / max(precision + recall, 1e-12),
        "auc": float(auc),
    }
