"""The statement says what the ledger knows, and says so when there is no guarantee."""

import dataclasses
import json
from pathlib import Path

import pytest

from pipeline.privacy.accountant import epsilon_of
from pipeline.privacy.keys import AttemptKey
from pipeline.privacy.ledger import Attempt, Ledger, LedgerError
from pipeline.privacy.mechanism import Mechanism
from pipeline.privacy.statement import LineageStep, build_statement, statement_text

MECHANISM = Mechanism(
    num_records=1_000,
    expected_batch_size=100,
    sampling_probability=0.1,
    noise_multiplier=2.0,
    max_grad_norm=0.1,
    num_steps=20,
    reserve_steps=10,
    delta=1e-5,
)
DIGEST = "ab" * 32


def start(
    ledger: Ledger,
    *,
    run: str = "run",
    phase: str = "private",
    mechanism: Mechanism = MECHANISM,
    first_step: int = 0,
    seed: int | None = None,
) -> Attempt:
    """An attempt with a key of its own, or the seed's."""
    key = AttemptKey.from_os_entropy() if seed is None else AttemptKey.seeded(seed)
    return ledger.open_attempt(
        run=run,
        phase=phase,
        mechanism=mechanism,
        key_commitment=key.commitment(),
        first_step=first_step,
        is_seeded=key.is_seeded,
    )


def train(ledger: Ledger, run: str, *, seed: int | None = None) -> None:
    """A run that lost five steps to a crash."""
    for first_step, last_step in ((0, 10), (5, 20)):
        attempt = start(ledger, run=run, first_step=first_step, seed=seed)
        attempt.charge(first_step, last_step - first_step)
    attempt.record_weights(20, DIGEST, "checkpoint")
    attempt.finish("complete", 20)


def build(ledger: Ledger, **changes: object) -> dict:
    fields: dict = {
        "run": "run",
        "lineage": [LineageStep(run="run", phase="private", num_steps=20)],
        "weights_digest": DIGEST,
        "hyperparameter_search": "unaccounted",
        "public_data": ["dead leaves: made by a program, 20,000 images"],
    }
    return build_statement(ledger=ledger, **{**fields, **changes})


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    return Ledger(str(tmp_path), "photos")


def test_statement_follows_ledger(ledger: Ledger) -> None:
    train(ledger, "run")
    train(ledger, "other")
    statement = json.loads(json.dumps(build(ledger), allow_nan=False))
    for name, steps in (("this_model", 20), ("this_run", 25), ("domain", 50)):
        expected = epsilon_of([(MECHANISM, steps)], 1e-5)
        assert statement["epsilon"][name] == expected.to_json()
    assert statement["is_private"]
    assert statement["domain"] == "photos" and statement["weights_sha256"] == DIGEST
    (phase,) = statement["phases"]
    assert Mechanism.from_json(phase["mechanism"]) == MECHANISM
    assert (phase["num_steps"], phase["num_charged_steps"], phase["num_attempts"]) == (20, 25, 2)
    head = ledger.head()
    assert statement["ledger"]["head_sha256"] == head.digest
    assert statement["ledger"]["num_entries"] == head.index + 1


def test_statement_tells_how_gradients_were_clipped(ledger: Ledger) -> None:
    """Of the run's own phases; of another run's it names the recipe that says so."""
    train(ledger, "run")
    statement = build(ledger, clipping={"private": "dropped where it is longer"})
    assert statement["phases"][0]["clipping"] == "dropped where it is longer"
    assert "- Clipping in private: dropped where it is longer." in statement_text(statement)
    other = build(ledger, run="later", clipping={"private": "of another phase of this name"})
    assert other["phases"][0]["clipping"] == "as the recipe of run run says"
    assert build(ledger)["phases"][0]["clipping"] == "not stated"


def test_discarded_results_are_counted(ledger: Ledger) -> None:
    """Going back behind a checkpoint on record is a choice that may have looked at it."""
    for first_step, steps in ((0, (5, 10)), (5, (8, 12)), (10, (20,))):
        attempt = start(ledger, first_step=first_step)
        for step in steps:
            attempt.charge(attempt.next_step, step - attempt.next_step)
            digest = DIGEST if step == 20 else f"{step:064x}"
            attempt.record_weights(step, digest, "checkpoint")
    statement = build(ledger)
    (phase,) = statement["phases"]
    num_discarded = (10 - 5) + (12 - 10)
    assert (phase["num_steps"], phase["num_discarded_steps"]) == (20, num_discarded)
    own = epsilon_of([(MECHANISM, 20 + num_discarded)], 1e-5)
    assert statement["epsilon"]["this_model"] == own.to_json() == statement["epsilon"]["this_run"]
    assert "| 20 | 7 | 27 in 3" in statement_text(statement)


def test_this_run_pays_for_what_it_started_from(ledger: Ledger) -> None:
    train(ledger, "before")
    attempt = start(ledger, phase="more")
    attempt.charge(0, 20)
    attempt.record_weights(20, "cd" * 32, "checkpoint")
    lineage = [
        LineageStep(run="before", phase="private", num_steps=20),
        LineageStep(run="run", phase="more", num_steps=20),
    ]
    epsilon = build(ledger, lineage=lineage, weights_digest="cd" * 32)["epsilon"]
    assert epsilon["this_model"] == epsilon_of([(MECHANISM, 40)], 1e-5).to_json()
    assert epsilon["this_run"] == epsilon_of([(MECHANISM, 45)], 1e-5).to_json()


def test_text_names_all_that_the_design_asks(ledger: Ledger) -> None:
    train(ledger, "run")
    text = statement_text(build(ledger))
    epsilon = epsilon_of([(MECHANISM, 20)], 1e-5).value
    for part in (
        f"({epsilon:g}, 1e-05)-differentially private",
        "central differential privacy",
        "one prepared record: a distinct prepared image with its label",
        "Labels are covered",
        "`replace_special`",
        "| private | 1,000 | 100 | 0.1 | 2.0 | 0.1 | 20 (+ 10 in reserve) | 20 | 0 | 25 in 2",
        "Poisson",
        "dp-accounting",
        "## Who is trusted",
        "operates the cluster",
        "NOT part of any epsilon here",
        "de-duplication",
        "the time steps take",
        "AES-256",
        "floating point",
        "dead leaves",
        ledger.head().digest,
        DIGEST,
    ):
        assert part in text, part
    assert "NOT PRIVATE" not in text and "UNBOUNDED" not in text


def test_statement_says_not_private(ledger: Ledger) -> None:
    train(ledger, "run", seed=1)
    statement = build(ledger)
    assert not statement["is_private"]
    assert statement["epsilon"]["this_model"] == "none: NOT PRIVATE"
    assert statement["epsilon"]["this_run"] == "none: NOT PRIVATE"
    assert statement["epsilon"]["domain"] == "unbounded"
    text = statement_text(statement)
    assert "**NOT PRIVATE.**" in text and "differentially private with respect" not in text


def test_unprotected_access_unbounds_the_domain_only(ledger: Ledger) -> None:
    train(ledger, "run")
    ledger.record_unprotected("rehearsal", "private", "--unprotected")
    statement = build(ledger)
    assert statement["is_private"] and statement["epsilon"]["domain"] == "unbounded"
    text = statement_text(statement)
    assert "UNBOUNDED" in text and "differentially private with respect" in text


def test_number_of_records_is_not_stated_under_add_or_remove_one(ledger: Ledger) -> None:
    hidden_n = dataclasses.replace(MECHANISM, adjacency="add_or_remove_one", num_records=None)
    attempt = start(ledger, mechanism=hidden_n)
    attempt.charge(0, 20)
    attempt.record_weights(20, DIGEST, "checkpoint")
    text = statement_text(build(ledger))
    assert "| private | private | 100 |" in text and "1,000" not in text


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"weights_digest": "cd" * 32}, "names weights"),
        ({"lineage": [LineageStep(run="run", phase="private", num_steps=21)]}, "names 21 steps"),
        ({"lineage": [LineageStep(run="run", phase="private", num_steps=0)]}, "names 0 steps"),
        ({"lineage": [LineageStep(run="run", phase="other", num_steps=1)]}, "no attempt"),
        ({"lineage": [LineageStep(run="run", phase="private", num_steps=10)]}, "step 10 of run"),
        ({"lineage": []}, "lineage is empty"),
        ({"hyperparameter_search": "some"}, "hyperparameter_search is 'some'"),
    ],
)
def test_unfounded_statements_are_refused(ledger: Ledger, changes: dict, message: str) -> None:
    train(ledger, "run")
    with pytest.raises((LedgerError, ValueError), match=message):
        build(ledger, **changes)


def test_text_of_another_format_is_refused() -> None:
    with pytest.raises(ValueError, match="format"):
        statement_text({"format": "something else"})
