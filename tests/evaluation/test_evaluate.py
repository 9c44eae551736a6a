"""The evaluation table over small prepared sets."""

from __future__ import annotations

import copy
import json

import numpy as np
import pytest
import torch

from pipeline.evaluation import probe as probe_module
from pipeline.evaluation.evaluate import (
    RANDOM_ENCODER,
    RAW_PIXELS,
    evaluate_encoders,
    format_results,
)
from pipeline.evaluation.held_out import held_out_loss
from pipeline.models.mae import MaskedAutoencoder
from pipeline.models.sizes import SIZES
from tests.evaluation.fake_store import make_store


def make_model(seed: int = 1, **options) -> MaskedAutoencoder:
    model = MaskedAutoencoder(SIZES["micro"], image_size=12, patch_size=3, **options)
    model.initialise(torch.Generator().manual_seed(seed))
    return model


def evaluate(**changes):
    options = {
        "models": {"trained": make_model(norm_pix_loss=True)},
        "probe_store": make_store(60, seed=1, name="probe"),
        "score_store": make_store(45, seed=2, name="score"),
        "private_stores": [make_store(30, seed=3, name="secret", visibility="private")],
        "rules": ("last_block", "last_12_blocks"),
        "shots": 4,
        "draws": 3,
    } | changes
    return evaluate_encoders(options.pop("models"), **options)


@pytest.fixture(scope="module", autouse=True)
def _short_fits():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(probe_module, "MAX_ITERATIONS", 10)
        yield


@pytest.fixture(scope="module")
def results(_short_fits: None) -> dict:
    return evaluate(seed=7)


def test_every_number_names_its_images_seed_interval_and_rule(results: dict) -> None:
    assert json.loads(json.dumps(results)) == results
    named = [(p["model"], p["rule"]) for p in results["probes"]]
    assert named == [
        (RAW_PIXELS, "raw colour pixels, 12 x 12"),
        (RANDOM_ENCODER, "last_block"),
        (RANDOM_ENCODER, "last_12_blocks"),
        ("trained", "last_block"),
        ("trained", "last_12_blocks"),
    ]
    for entry in results["probes"]:
        for result in (entry["linear_probe"], entry["few_shot"]):
            low, high = result["interval"]
            assert low <= result["accuracy"] <= high
            assert (result["num_test"], result["seed"], result["rule"]) == (45, 7, entry["rule"])
        assert entry["linear_probe"]["num_train"] == 60
        assert (entry["few_shot"]["shots"], entry["few_shot"]["draws"]) == (4, 3)
        assert entry["rule_description"]
    raw = results["probes"][0]["linear_probe"]["accuracy"]
    assert raw > 0.9
    for loss in results["losses"]:
        assert loss["interval"][0] < loss["loss"] < loss["interval"][1]
        assert (loss["num_images"], loss["images"], loss["norm_pix_loss"]) == (45, "score", True)
    assert [(i["role"], i["num_images"]) for i in results["images"]] == [
        ("fitted on", 60),
        ("scored on", 45),
    ]


def test_the_same_inputs_give_the_same_table() -> None:
    """Guarantee 2 of evaluate_encoders."""
    options = {"rules": ("last_block",), "draws": 2}
    assert evaluate(**options) == evaluate(**options)


def test_the_random_encoder_has_fresh_weights_and_leaves_the_model_alone() -> None:
    model = make_model()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    results = evaluate(models={"trained": model}, rules=("last_block",), shots=0)
    assert all(torch.equal(t, before[n]) for n, t in model.state_dict().items())
    losses = {entry["model"]: entry["loss"] for entry in results["losses"]}
    fresh = held_out_loss(make_model(0), make_store(45, seed=2, name="score"))
    assert losses[RANDOM_ENCODER] == fresh.loss != losses["trained"]


def test_unreadable_and_unlabelled_images_are_left_out_and_counted() -> None:
    probe = make_store(60, seed=1, name="probe")
    probe.contents[5] = probe.contents[5][:40]
    probe.known_labels = probe.known_labels.copy()
    probe.known_labels[7] = -1
    results = evaluate(probe_store=probe, rules=("last_block",), shots=0)
    assert results["images"][0]["num_images"] == 58
    assert results["images"][0]["num_unreadable"] == 1
    raw_pixels = results["probes"][0]["linear_probe"]
    assert raw_pixels["num_train"] == 58
    assert raw_pixels["accuracy"] > 0.9, "labels must stay with their images"


def test_max_images_takes_a_subset() -> None:
    results = evaluate(max_images=30, rules=("last_block",), shots=0)
    assert [i["num_images"] for i in results["images"]] == [30, 30]
    assert all(p["few_shot"] is None for p in results["probes"])


def test_text_table(results: dict) -> None:
    text = format_results(results)
    assert "4 per class" in text
    assert "last_12_blocks" in text
    assert "60 images fitted on, 45 scored, seed 7" in text
    assert "45 images of score, norm_pix_loss on (1e-06)" in text
    for entry in (probes := copy.deepcopy(results["probes"])):
        entry["few_shot"] = None
    assert "4 per class" not in format_results({**results, "probes": probes})


def test_an_empty_held_out_set_is_not_replaced_in_silence() -> None:
    class Sized(type(make_store(1, seed=0))):
        def __len__(self) -> int:
            return self.num_records

    empty = Sized([], np.zeros(0), "empty")
    with pytest.raises(ValueError, match="'empty' has 0 readable"):
        evaluate(held_out_store=empty, rules=("last_block",), shots=0)


def test_progress_is_told() -> None:
    said: list[str] = []
    evaluate(progress=said.append, rules=("last_block",), shots=0)
    assert any("probing trained" in line for line in said)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"models": {}}, "models is empty"),
        ({"models": {RAW_PIXELS: make_model()}}, "use another name"),
        (
            {
                "models": {
                    "a": make_model(),
                    "b": MaskedAutoencoder(SIZES["micro"], image_size=9, patch_size=3),
                }
            },
            "image sizes",
        ),
        ({"rules": ("mean",)}, "known rules"),
    ],
)
def test_wrong_inputs_are_refused(changes: dict, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        evaluate(**changes)


def test_sets_without_labels_or_images_are_refused() -> None:
    store = make_store(12, seed=1, name="bare")
    store.known_labels = np.full(12, -1)
    with pytest.raises(ValueError, match="'bare' has no labelled image"):
        evaluate(probe_store=store)
    broken = make_store(12, seed=1, name="broken")
    broken.contents = [bytes([i]) for i in range(12)]
    with pytest.raises(ValueError, match="'broken' has no readable"):
        evaluate(probe_store=broken)
