"""Accuracy of frozen features: a linear probe and few-shot.

Shape letters: N images, F features, C classes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from pipeline.evaluation.intervals import mean_interval, wilson_interval

# Penalties on features scaled to unit mean square per image; one is chosen on held-back images.
L2_GRID = (1e-4, 1e-5, 1e-6, 1e-7, 1e-8)
FEW_SHOT_L2 = 1e-4
VALIDATION_SHARE = 0.2
MAX_ITERATIONS = 100
RAW_PIXEL_SIDE = 32


@dataclass(frozen=True, kw_only=True)
class ProbeResult:
    """Accuracy of a linear probe.

    Args:
        accuracy: Share of the test images that are classified rightly, in [0, 1].
        interval: Wilson 95 % interval over the test images.
        num_train: Images that the probe was fitted on.
        num_test: Images that it was scored on.
        num_classes: Classes of the fitting images.
        num_features: F.
        l2: The penalty chosen on held-back fitting images.
        seed: Which images were held back for that choice.
        rule: How an image became features.
    """

    accuracy: float
    interval: tuple[float, float]
    num_train: int
    num_test: int
    num_classes: int
    num_features: int
    l2: float
    seed: int
    rule: str


@dataclass(frozen=True, kw_only=True)
class FewShotResult:
    """Accuracy with few labelled images per class.

    Args:
        accuracy: Mean over the draws, in [0, 1].
        interval: 95 % Student t interval of that mean over the draws; None for a single draw.
        accuracies: Of each draw.
        shots: Labelled images per class.
        draws: How many times they were drawn anew.
        num_test: Images that each draw was scored on.
        num_classes: Classes.
        seed: Which images were drawn.
        rule: How an image became features.
    """

    accuracy: float
    interval: tuple[float, float] | None
    accuracies: tuple[float, ...]
    shots: int
    draws: int
    num_test: int
    num_classes: int
    seed: int
    rule: str


def linear_probe(
    train_features_NF: Tensor,
    train_labels_N: npt.ArrayLike,
    test_features_NF: Tensor,
    test_labels_N: npt.ArrayLike,
    *,
    rule: str,
    seed: int = 0,
) -> ProbeResult:
    """Multinomial logistic regression on standardised features, scored on other images.

    The penalty is chosen on a fifth of the fitting images, then the probe is fitted on all of them;
    the test images choose nothing.

    Args:
        train_features_NF: Features of the fitting images.
        train_labels_N: Their labels, integers.
        test_features_NF: Features of the images that are scored.
        test_labels_N: Their labels; one that no fitting image has counts as an error.
        rule: Name of the feature rule, for the table.
        seed: Which fitting images choose the penalty.
    Raises:
        ValueError: fewer than two classes, or shapes that do not belong together.

    Guarantees:
        1. The same inputs and seed give the same result
           (test_the_same_inputs_give_the_same_result).
        2. Test images influence neither fit nor penalty nor standardisation
           (test_test_images_choose_nothing).
    """
    train, test = _checked(train_features_NF, train_labels_N, test_features_NF, test_labels_N)
    classes = probe_classes(train.labels, test.labels)
    order = np.random.default_rng([seed, 0]).permutation(len(train.labels))
    held_back = order[: max(1, round(VALIDATION_SHARE * len(order)))]
    fitted_on = order[len(held_back) :] if len(order) > 4 else order
    l2 = _choose_l2(train.rows(fitted_on), train.rows(held_back), classes)
    probe = _fit(train, classes, l2)
    num_right = int((probe.predict(test.features) == test.labels).sum())
    return ProbeResult(
        accuracy=num_right / len(test.labels),
        interval=wilson_interval(num_right, len(test.labels)),
        num_train=len(train.labels),
        num_test=len(test.labels),
        num_classes=len(classes),
        num_features=train.features.shape[1],
        l2=l2,
        seed=seed,
        rule=rule,
    )


def few_shot(
    train_features_NF: Tensor,
    train_labels_N: npt.ArrayLike,
    test_features_NF: Tensor,
    test_labels_N: npt.ArrayLike,
    *,
    rule: str,
    shots: int = 10,
    draws: int = 5,
    seed: int = 0,
) -> FewShotResult:
    """Logistic regression on `shots` images per class, drawn `draws` times.

    Nothing but the drawn images is used: no other image standardises the features, and the penalty
    is a constant.

    Args:
        shots: Images per class; every class of the fitting set must have as many.
        draws: Independent draws.
        seed: Which images are drawn; the rest as in `linear_probe`.
    Raises:
        ValueError: a class with fewer than `shots` images, or as in `linear_probe`.
    """
    if shots < 1 or draws < 1:
        raise ValueError(f"shots is {shots}, draws {draws}: both must be at least 1")
    train, test = _checked(train_features_NF, train_labels_N, test_features_NF, test_labels_N)
    classes = probe_classes(train.labels, test.labels, shots=shots)
    members = [np.flatnonzero(train.labels == label) for label in classes]
    accuracies = []
    for draw in range(draws):
        random = np.random.default_rng([seed, 1, draw])
        drawn = np.concatenate([random.permutation(ids)[:shots] for ids in members])
        probe = _fit(train.rows(drawn), classes, FEW_SHOT_L2)
        accuracies.append(float((probe.predict(test.features) == test.labels).mean()))
    return FewShotResult(
        accuracy=float(np.mean(accuracies)),
        interval=mean_interval(accuracies),
        accuracies=tuple(accuracies),
        shots=shots,
        draws=draws,
        num_test=len(test.labels),
        num_classes=len(classes),
        seed=seed,
        rule=rule,
    )


def probe_classes(
    train_labels_N: npt.NDArray[np.int64], test_labels_N: npt.NDArray[np.int64], *, shots: int = 1
) -> npt.NDArray[np.int64]:
    """The classes of the fitting images, in order.

    Args:
        shots: Images that every class must have.
    Raises:
        ValueError: fewer than two classes, a class with fewer than `shots` images, or no image to
            score.
    """
    classes, counts = np.unique(train_labels_N, return_counts=True)
    if len(classes) < 2:
        raise ValueError(
            f"labels have {len(classes)} class(es): a probe needs two or more; give a labelled set"
        )
    if not len(test_labels_N):
        raise ValueError("test_labels has no image: give labelled images to score")
    if counts.min() < shots:
        raise ValueError(
            f"shots is {shots}, but a class has only {counts.min()} labelled images: use fewer "
            f"shots or more labelled images"
        )
    return classes


def raw_pixel_features(images_N3HW: Tensor) -> tuple[Tensor, str]:
    """Pixels themselves as features_NF, the baseline that needs no encoder, and the rule's name.

    Larger images are averaged down to 32 pixels a side; grey ones count one channel.

    Args:
        images_N3HW: uint8.
    """
    pixels = images_N3HW.float() / 255
    if bool((images_N3HW == images_N3HW[:, :1]).all()):
        pixels = pixels[:, :1]
    side = min(RAW_PIXEL_SIDE, pixels.shape[-1])
    if side < pixels.shape[-1]:
        pixels = F.adaptive_avg_pool2d(pixels, side)
    colours = "grey" if pixels.shape[1] == 1 else "colour"
    return pixels.flatten(1), f"raw {colours} pixels, {side} x {side}"


@dataclass(frozen=True)
class _Labelled:
    """Features [N, F] in float64 and labels [N]."""

    features: Tensor
    labels: npt.NDArray[np.int64]

    def rows(self, ids: npt.NDArray[np.int64]) -> _Labelled:
        return _Labelled(self.features[torch.from_numpy(ids)], self.labels[ids])


@dataclass(frozen=True)
class _Probe:
    """A linear classifier: mean, scale [F] of its fitting images, weight [F, C], bias [C]."""

    mean: Tensor
    scale: Tensor
    weight: Tensor
    bias: Tensor
    classes: npt.NDArray[np.int64]

    def logits(self, features_NF: Tensor) -> Tensor:
        return (features_NF - self.mean) * self.scale @ self.weight + self.bias

    def predict(self, features_NF: Tensor) -> npt.NDArray[np.int64]:
        return self.classes[self.logits(features_NF).argmax(1).numpy()]


def _checked(
    train_features: Tensor,
    train_labels: npt.ArrayLike,
    test_features: Tensor,
    test_labels: npt.ArrayLike,
) -> tuple[_Labelled, _Labelled]:
    parts = []
    for name, features, labels in (
        ("train", train_features, np.asarray(train_labels, np.int64)),
        ("test", test_features, np.asarray(test_labels, np.int64)),
    ):
        if features.dim() != 2 or labels.shape != (len(features),):
            raise ValueError(
                f"{name}_features have shape {tuple(features.shape)} and {name}_labels "
                f"{labels.shape}: allowed are [N, F] and [N]"
            )
        if not bool(torch.isfinite(features).all()):
            raise ValueError(f"{name}_features are not all finite: the encoder has diverged")
        parts.append(_Labelled(features.detach().cpu().double(), labels))
    if parts[0].features.shape[1] != parts[1].features.shape[1]:
        raise ValueError(
            f"train_features have {parts[0].features.shape[1]} columns, test_features "
            f"{parts[1].features.shape[1]}: allowed is the same number"
        )
    return parts[0], parts[1]


def _choose_l2(fitted_on: _Labelled, held_back: _Labelled, classes: npt.NDArray[np.int64]) -> float:
    """The penalty of lowest log loss on held-back images."""
    best, best_loss = L2_GRID[0], math.inf
    targets = torch.from_numpy(np.searchsorted(classes, held_back.labels))
    for l2 in L2_GRID:
        probe = _fit(fitted_on, classes, l2)
        loss = float(F.cross_entropy(probe.logits(held_back.features), targets))
        if loss >= best_loss:
            break  # the loss is unimodal in the penalty but for noise
        best, best_loss = l2, loss
    return best


def _fit(train: _Labelled, classes: npt.NDArray[np.int64], l2: float) -> _Probe:
    """Minimise mean log loss + l2 |W|^2 by L-BFGS from zero, in coordinates that make it round."""
    mean_F = train.features.mean(0)
    deviation_F = (train.features - mean_F).square().mean(0).sqrt()
    # A feature that never moves has no scale; one that hardly moves must not become huge.
    floor = 1e-3 * deviation_F.max().clamp_min(1e-12)
    scale_F = 1 / (deviation_F.maximum(floor) * math.sqrt(train.features.shape[1]))
    scaled_NF = (train.features - mean_F) * scale_F
    basis_FK, inputs_NK = _coordinates(scaled_NF, len(classes), l2)
    targets_N = torch.from_numpy(np.searchsorted(classes, train.labels))
    weight_KC = torch.zeros(inputs_NK.shape[1], len(classes), dtype=torch.float64)
    bias_C = torch.zeros(len(classes), dtype=torch.float64)
    optimizer = torch.optim.LBFGS(
        [weight_KC.requires_grad_(True), bias_C.requires_grad_(True)],
        max_iter=MAX_ITERATIONS,
        history_size=20,
        tolerance_grad=1e-8,
        tolerance_change=1e-12,
        line_search_fn="strong_wolfe",
    )

    def objective() -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(inputs_NK @ weight_KC + bias_C, targets_N)
        loss = loss + l2 * (basis_FK @ weight_KC).square().sum()
        loss.backward()
        return loss

    optimizer.step(objective)
    return _Probe(mean_F, scale_F, basis_FK @ weight_KC.detach(), bias_C.detach(), classes)


def _coordinates(scaled_NF: Tensor, num_classes: int, l2: float) -> tuple[Tensor, Tensor]:
    """A basis [F, K] for the weights in which the objective is nearly round, and the inputs in it.

    At zero weights the curvature is X'X / (N C) + 2 l2 = L L' along each class; weights L'^-1 U see
    the identity instead. With fewer images than features the weights stay in the images' span.
    """
    num_images, num_features = scaled_NF.shape
    span_FK = torch.eye(num_features, dtype=torch.float64)
    if num_images < num_features:
        span_FK, _ = torch.linalg.qr(scaled_NF.T)
    inputs_NK = scaled_NF @ span_FK if num_images < num_features else scaled_NF
    curvature = inputs_NK.T @ inputs_NK / (num_images * num_classes)
    lower = torch.linalg.cholesky(curvature + 2 * l2 * torch.eye(len(curvature)).double())
    basis_FK = torch.linalg.solve_triangular(lower.T, span_FK, upper=True, left=False)
    return basis_FK, scaled_NF @ basis_FK
