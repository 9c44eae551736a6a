"""Probes against the conditions of an optimum."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from pipeline.evaluation import probe as probe_module
from pipeline.evaluation.intervals import mean_interval, wilson_interval
from pipeline.evaluation.probe import few_shot, linear_probe, raw_pixel_features


def blobs(num_images: int, num_classes: int = 3, num_features: int = 8, seed: int = 0):
    """Classes around corners of a simplex, unit spread, labels 10, 20, 30 …"""
    random = np.random.default_rng(seed)
    labels = np.arange(num_images) % num_classes
    features = random.standard_normal((num_images, num_features))
    features[np.arange(num_images), labels] += 4
    return torch.from_numpy(features).float(), 10 * (labels + 1)


@pytest.mark.parametrize(("num_images", "num_features"), [(200, 8), (12, 40)])
@pytest.mark.parametrize("l2", [1e-2, 1e-5])
def test_a_fit_is_the_minimum(num_images: int, num_features: int, l2: float) -> None:
    """The gradient vanishes, in the plain coordinates and written out by hand."""
    features, labels = blobs(num_images, num_features=num_features)
    features = features.double() * torch.logspace(-2, 2, num_features)
    features[:, 1] = features[:, 0] + 0.01 * features[:, 1]  # nearly collinear
    train = probe_module._Labelled(features, labels)
    probe = probe_module._fit(train, np.unique(labels), l2)
    inputs = ((features - probe.mean) * probe.scale).numpy()
    logits = inputs @ probe.weight.numpy() + probe.bias.numpy()
    targets = np.eye(3)[labels // 10 - 1]
    at_start = inputs.T @ (1 / 3 - targets) / num_images
    shares = np.exp(logits - logits.max(1, keepdims=True))
    shares /= shares.sum(1, keepdims=True)
    gradient = inputs.T @ (shares - targets) / num_images + 2 * l2 * probe.weight.numpy()
    assert np.abs(gradient).max() < 1e-5 * np.abs(at_start).max()
    assert np.abs((shares - targets).mean(0)).max() < 1e-5
    assert torch.allclose(probe.logits(features), torch.from_numpy(logits))


def test_standardised_features_have_unit_mean_square() -> None:
    features, labels = blobs(100)
    fitted = probe_module._Labelled(100 + 7 * features.double(), labels)
    probe = probe_module._fit(fitted, np.unique(labels), 1e-3)
    scaled = (fitted.features - probe.mean) * probe.scale
    torch.testing.assert_close(scaled.mean(0), torch.zeros(8, dtype=torch.float64))
    torch.testing.assert_close(scaled.square().sum(1).mean().item(), 1.0)


def test_features_that_hardly_move_do_not_explode() -> None:
    """A millionth of class information in the fitting images is not blown up to full size."""
    features, labels = blobs(100)
    features, (other, other_labels) = features.double(), blobs(100, seed=1)
    other = other.double()
    features[:, 3] = 5 + 1e-6 * torch.from_numpy(labels)
    other[:, 3] = 5 + 1e-3 * other[:, 3]
    features[:, 4] = other[:, 4] = 5.0
    result = linear_probe(features, labels, other, other_labels, rule="r")
    assert result.accuracy > 0.9


def test_linear_probe_reports_what_it_did() -> None:
    features, labels = blobs(300)
    test_features, test_labels = blobs(90, seed=1)
    result = linear_probe(features, labels, test_features, test_labels, rule="last_block", seed=3)
    assert 0.95 < result.accuracy <= 1
    assert result.interval == wilson_interval(round(90 * result.accuracy), 90)
    assert (result.num_train, result.num_test, result.num_classes) == (300, 90, 3)
    assert (result.num_features, result.seed, result.rule) == (8, 3, "last_block")
    assert result.l2 in probe_module.L2_GRID


def test_the_same_inputs_give_the_same_result() -> None:
    """Guarantee 1 of linear_probe, and of few_shot."""
    features, labels = blobs(60)
    for score in (linear_probe, few_shot):
        once, again, other = (
            score(features, labels, features, labels, rule="r", seed=s) for s in (1, 1, 2)
        )
        assert once == again
        assert once.seed != other.seed


def test_few_shot_draws_differ_by_draw_and_seed() -> None:
    features, labels = blobs(600)
    features[:, :3] -= torch.nn.functional.one_hot(torch.arange(600) % 3, 3) * 3.2  # hard
    results = [
        few_shot(features, labels, features, labels, rule="r", shots=2, seed=s) for s in (1, 2)
    ]
    assert len(set(results[0].accuracies)) > 1
    assert results[0].accuracies != results[1].accuracies


def test_test_images_choose_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guarantee 2 of linear_probe."""
    features, labels = blobs(60)
    fitted: list[probe_module._Probe] = []
    original = probe_module._fit

    def remember(*arguments):
        fitted.append(original(*arguments))
        return fitted[-1]

    monkeypatch.setattr(probe_module, "_fit", remember)
    one = linear_probe(features, labels, features[:9], labels[:9], rule="r")
    num_fits = len(fitted)
    two = linear_probe(features, labels, 50 - 9 * features, labels, rule="r")
    assert one.l2 == two.l2
    assert len(fitted) == 2 * num_fits
    for first, second in zip(fitted, fitted[num_fits:], strict=False):
        assert torch.equal(first.weight, second.weight)
        assert torch.equal(first.mean, second.mean)


def test_few_shot_uses_the_drawn_images_only(monkeypatch: pytest.MonkeyPatch) -> None:
    features, labels = blobs(300)
    seen = []
    original = probe_module._fit

    def remember(train, classes, l2):
        seen.append(train)
        return original(train, classes, l2)

    monkeypatch.setattr(probe_module, "_fit", remember)
    result = few_shot(features, labels, features, labels, rule="r", shots=4, draws=3)
    assert [np.bincount(s.labels // 10).tolist() for s in seen] == [[0, 4, 4, 4]] * 3
    assert all(len(torch.unique(s.features, dim=0)) == 12 for s in seen)
    probe = original(seen[0], np.unique(labels), probe_module.FEW_SHOT_L2)
    torch.testing.assert_close(probe.mean, seen[0].features.mean(0))
    assert result.accuracy == pytest.approx(np.mean(result.accuracies))
    assert result.interval == mean_interval(result.accuracies)


def test_a_class_that_was_never_shown_counts_as_an_error() -> None:
    features, labels = blobs(60)
    test_labels = labels.copy()
    test_labels[labels == 30] = 40
    result = linear_probe(features, labels, features, test_labels, rule="r")
    assert result.accuracy <= 2 / 3
    assert result.num_classes == 3


def test_raw_pixels() -> None:
    grey = torch.randint(0, 256, (2, 1, 28, 28), dtype=torch.uint8).repeat(1, 3, 1, 1)
    features, rule = raw_pixel_features(grey)
    assert rule == "raw grey pixels, 28 x 28"
    torch.testing.assert_close(features, grey[:, 0].flatten(1) / 255)
    colour = torch.randint(0, 256, (2, 3, 64, 64), dtype=torch.uint8)
    features, rule = raw_pixel_features(colour)
    assert rule == "raw colour pixels, 32 x 32"
    assert features.shape == (2, 3 * 32 * 32)
    torch.testing.assert_close(features[0, 0], colour[0, 0, :2, :2].float().mean() / 255)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"labels": np.ones(60)}, "1 class"),
        ({"labels": np.arange(59)}, "train_labels"),
        ({"features": torch.full((60, 8), torch.nan)}, "not all finite"),
        ({"features": torch.zeros(60, 9)}, "9 columns"),
    ],
)
def test_inputs_that_do_not_fit_are_refused(change: dict, named: str) -> None:
    features, labels = blobs(60)
    with pytest.raises(ValueError, match=named):
        linear_probe(
            change.get("features", features),
            change.get("labels", labels),
            features,
            labels,
            rule="r",
        )


def test_few_shot_refuses_scarce_classes() -> None:
    features, labels = blobs(12)
    with pytest.raises(ValueError, match="only 4 labelled images"):
        few_shot(features, labels, features, labels, rule="r", shots=5)
    with pytest.raises(ValueError, match="shots is 0"):
        few_shot(features, labels, features, labels, rule="r", shots=0)
