"""Facts that may be told, and the numbers of a real statement."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from pipeline.privacy.keys import AttemptKey
from pipeline.privacy.ledger import Ledger
from pipeline.privacy.mechanism import Mechanism
from pipeline.privacy.statement import LineageStep, build_statement
from pipeline.report.facts import Pictures, PrivacyFacts, best_probe, trained_probes
from tests.report.report_inputs import EVALUATION, pictures, private, warmup

MECHANISM = Mechanism(
    num_records=1_000,
    expected_batch_size=50,
    sampling_probability=0.05,
    noise_multiplier=1.0,
    max_grad_norm=0.5,
    num_steps=20,
    reserve_steps=10,
    delta=1e-5,
)


def statement(home: Path, *, seed: int | None = None, unprotected: bool = False) -> dict:
    ledger = Ledger(str(home), "album")
    key = AttemptKey.from_os_entropy() if seed is None else AttemptKey.seeded(seed)
    attempt = ledger.open_attempt(
        run="run",
        phase="private",
        mechanism=MECHANISM,
        key_commitment=key.commitment(),
        first_step=0,
        is_seeded=key.is_seeded,
    )
    attempt.charge(0, 20)
    attempt.record_weights(20, "ab" * 32, "export")
    attempt.finish("complete", 20)
    if unprotected:
        ledger.record_unprotected("other", "public", "rehearsal")
    return build_statement(
        ledger=ledger,
        run="run",
        lineage=[LineageStep(run="run", phase="private", num_steps=20)],
        weights_digest="ab" * 32,
        hyperparameter_search="public",
    )


def test_the_numbers_of_a_statement(tmp_path: Path) -> None:
    made = statement(tmp_path)
    facts = PrivacyFacts.from_statement(made, target_epsilon=3.0)
    assert facts.domain == "album"
    assert facts.epsilon == facts.run_epsilon == made["epsilon"]["this_model"]["value"] > 0
    assert facts.domain_epsilon == made["epsilon"]["domain"]["value"]
    assert (facts.num_records, facts.expected_batch_size, facts.num_steps) == (1_000, 50, 20)
    assert (facts.noise_multiplier, facts.max_grad_norm, facts.delta) == (1.0, 0.5, 1e-5)
    assert facts.target_epsilon == 3.0
    assert "dp-accounting" in facts.accountant


def test_a_statement_without_a_guarantee_has_no_epsilon(tmp_path: Path) -> None:
    facts = PrivacyFacts.from_statement(statement(tmp_path, seed=1))
    assert facts.epsilon is None
    assert facts.run_epsilon is None


def test_an_unbounded_domain_has_no_epsilon(tmp_path: Path) -> None:
    facts = PrivacyFacts.from_statement(statement(tmp_path, unprotected=True))
    assert facts.domain_epsilon is None
    assert facts.epsilon is not None


def test_images_seen_and_speed() -> None:
    assert private().num_images_seen == 150 * 2_048
    assert private().images_per_second is None
    assert warmup().images_per_second == 2_400
    assert warmup(points=[]).images_per_second is None


def test_a_public_phase_spends_nothing() -> None:
    points = [dataclasses.replace(warmup().points[0], epsilon=1.0)]
    with pytest.raises(ValueError, match="'warmup' is public and has an epsilon"):
        warmup(points=points)


def test_pictures_must_belong_together() -> None:
    good = pictures()
    for wrong in (good.masked[:2], good.masked.astype(np.float32), good.masked[..., :1]):
        with pytest.raises(ValueError, match="masked is"):
            Pictures(
                source="x",
                original=good.original,
                masked=wrong,
                reconstructed=good.reconstructed,
            )


def test_the_headline_probe_is_the_final_models_best() -> None:
    """Not the warm-up's, although it scored higher in this table; not a baseline's."""
    found = best_probe(trained_probes(EVALUATION))
    assert found is not None
    assert (found["model"], found["rule"]) == ("after private", "last_12_blocks")
    assert best_probe(trained_probes(None)) is None
