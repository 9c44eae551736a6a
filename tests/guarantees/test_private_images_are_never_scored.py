"""Pitfalls 22 and 31: an accuracy or loss on private images is a release."""

from __future__ import annotations

import numpy as np
import pytest

from pipeline.evaluation import probe as probe_module
from pipeline.evaluation import stores as stores_module
from pipeline.evaluation.evaluate import evaluate_encoders
from pipeline.evaluation.held_out import held_out_loss
from pipeline.evaluation.stores import assert_disjoint
from pipeline.models.mae import MaskedAutoencoder
from pipeline.models.sizes import SIZES
from tests.evaluation.fake_store import FakeStore, make_store

ROLES = ("probe_store", "score_store", "held_out_store")


def evaluate(**changes) -> None:
    options = {
        "probe_store": make_store(30, seed=1, name="probe"),
        "score_store": make_store(30, seed=2, name="score"),
        "held_out_store": make_store(30, seed=3, name="held-out"),
        "private_stores": [
            make_store(30, seed=4, name="diaries", visibility="private"),
            make_store(30, seed=5, name="letters", visibility="private"),
        ],
    } | changes
    model = MaskedAutoencoder(SIZES["micro"], image_size=12, patch_size=3)
    evaluate_encoders({"trained": model}, shots=0, **options)


@pytest.mark.parametrize("role", ROLES)
def test_an_image_of_a_private_set_is_refused(role: str) -> None:
    """Guarantee 1 of evaluate_encoders: one shared image, in the last private set."""
    letters = make_store(30, seed=5, name="letters", visibility="private")
    scored = make_store(30, seed=9, name="scored")
    scored.contents[17] = letters.contents[29]
    with pytest.raises(ValueError, match="shares images with the private set 'letters'") as refusal:
        evaluate(**{role: scored})
    assert not any(character.isdigit() for character in str(refusal.value)), (
        "which and how many images are shared is a fact about the private set"
    )


@pytest.mark.parametrize("role", ROLES)
def test_a_set_marked_private_is_refused(role: str) -> None:
    store = make_store(30, seed=9, name="scored", visibility="private")
    with pytest.raises(ValueError, match="marked private"):
        evaluate(**{role: store})
    with pytest.raises(ValueError, match="marked private"):
        held_out_loss(MaskedAutoencoder(SIZES["micro"], image_size=12, patch_size=3), store)


def test_disjoint_sets_are_scored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe_module, "MAX_ITERATIONS", 2)
    evaluate()


def test_fitting_and_scoring_images_differ() -> None:
    probe = make_store(30, seed=1, name="probe")
    score = make_store(30, seed=2, name="score")
    score.contents[3] = probe.contents[4]
    with pytest.raises(ValueError, match="share 1 images"):
        evaluate(probe_store=probe, score_store=score)


class _Digests(FakeStore):
    """A set known by its digests alone."""

    def __init__(self, digests: np.ndarray) -> None:
        super().__init__([b""] * len(digests), np.zeros(len(digests)))
        self.digests = digests

    def pixel_digests(self, record_ids=None) -> np.ndarray:
        return self.digests if record_ids is None else self.digests[record_ids]


@pytest.mark.parametrize("position", range(10))
def test_large_private_sets_are_read_in_parts(
    position: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stores_module, "DIGESTS_PER_READ", 3)
    random = np.random.default_rng(0)
    labelled = random.integers(0, 256, (6, 32), dtype=np.uint8)
    private = random.integers(0, 256, (10, 32), dtype=np.uint8)
    assert_disjoint("a", _Digests(labelled), [("b", _Digests(private))])
    # Equal in the first bytes only: still another image.
    private[position, :8] = labelled[2, :8]
    assert_disjoint("a", _Digests(labelled), [("b", _Digests(private))])
    private[position] = labelled[2]
    with pytest.raises(ValueError, match="shares images"):
        assert_disjoint("a", _Digests(labelled), [("b", _Digests(private))])


def test_a_private_set_without_digests_is_refused() -> None:
    """Unknown means refuse: what cannot be compared is not assumed disjoint."""

    class Bare(FakeStore):
        def pixel_digests(self, record_ids=None) -> np.ndarray:
            raise ValueError("made without sources.arrow")

    private = Bare([b"x"], np.zeros(1), "bare", "private")
    with pytest.raises(ValueError, match="sources"):
        evaluate(private_stores=[private])
