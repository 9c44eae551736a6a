"""One phase in this process: public and private, resumed, checked, charged."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from phase_fixtures import Crash, crash_at, run, units

from pipeline.data.stream import DeliveryError, StreamConfig, Unit
from pipeline.privacy.ledger import Ledger
from pipeline.storage import Location
from pipeline.training.checkpoint import latest_checkpoint, load_checkpoint
from pipeline.training.metrics import PublicMetrics, TensorBoardLog
from pipeline.training.phase import run_phase
from pipeline.training.ranks import Ranks
from pipeline.training.settings import PhaseSettings

Make = Callable[..., PhaseSettings]


def weights_of(settings: PhaseSettings) -> dict[str, torch.Tensor]:
    latest = latest_checkpoint(Location(settings.output))
    assert latest is not None
    return load_checkpoint(latest).weights


@pytest.mark.parametrize("kind", ["public", "private"])
def test_a_phase_runs_to_its_end_and_is_not_run_again(settings: Make, kind: str) -> None:
    made = settings(kind)
    outcome, shown = run(made)
    assert (outcome.step, outcome.finished) == (6, "complete")
    assert [m.step for m in shown] == [2, 4, 6]
    assert all(m.held_out_loss is not None and m.held_out_loss > 0 for m in shown)
    again, nothing = run(made)
    assert again == outcome and not nothing


def test_public_phase_learns(settings: Make) -> None:
    _, shown = run(settings("public", phase={"steps": 60, "checkpoint_interval": 10}))
    assert shown[-1].train_loss < 0.95 * shown[0].train_loss


def test_private_phase_changes_the_weights_and_keeps_positions(settings: Make) -> None:
    from pipeline.training.phase import build_model

    made = settings("private")
    run(made)
    before, after = build_model(made.model).state_dict(), weights_of(made)
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    trained = {n for n, p in build_model(made.model).named_parameters() if p.requires_grad}
    assert changed == trained
    assert "encoder.pos_embed" in set(before) - changed


@pytest.mark.parametrize("kind", ["public", "private"])
def test_resumed_equals_uninterrupted_with_a_pinned_key(
    settings: Make, public_set: str, kind: str, tmp_path: Any
) -> None:
    """Public phases always, private ones in the seeded test mode (on a public set)."""
    changes: dict[str, Any] = {"seed": 7, "dataset_root": public_set}
    if kind == "private":
        changes["domain"] = "public-some"
    straight = settings(kind, output=str(tmp_path / "straight"), **changes)
    run(straight)
    broken = settings(kind, output=str(tmp_path / "broken"), **changes)
    broken = replace(broken, run="another-run")
    with pytest.raises(Crash):
        run(broken, crash_at(3))
    outcome, shown = run(broken)
    assert outcome.step == 6 and [m.step for m in shown] == [4, 6]
    assert_equal(weights_of(straight), weights_of(broken))


def assert_equal(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> None:
    assert left.keys() == right.keys()
    for name, value in left.items():
        assert torch.equal(value, right[name]), name


def test_an_unseeded_attempt_never_repeats_another(settings: Make, tmp_path: Any) -> None:
    first = settings("private", output=str(tmp_path / "a"))
    second = replace(first, run="twin", output=str(tmp_path / "b"))
    run(first)
    run(second)
    name = "decoder_pred.weight"
    assert not torch.equal(weights_of(first)[name], weights_of(second)[name])


def test_the_next_phase_starts_from_the_one_before(settings: Make, tmp_path: Any) -> None:
    warmup = settings("public", output=str(tmp_path / "warmup"))
    run(warmup)
    start = latest_checkpoint(Location(warmup.output))
    assert start is not None
    made = settings("private", init_from=str(start))
    run(made)
    latest = latest_checkpoint(Location(made.output))
    assert latest is not None
    saved = load_checkpoint(latest)
    assert saved.facts.origin == [load_checkpoint(start).weights_digest]
    own = {"domain": "some-domain", "run": "some-run", "phase": "some", "num_steps": 6}
    assert saved.facts.lineage == [own]
    assert saved.facts.guarantee == "differential privacy"


def test_another_step_or_a_missing_unit_stops_the_run(settings: Make) -> None:
    def drop_one(config: StreamConfig) -> Iterator[Unit]:
        for unit in units(config):
            if unit.step != 2:
                yield unit

    with pytest.raises(DeliveryError):
        run(settings("private"), drop_one)


def test_a_repeated_or_lost_record_stops_the_run(settings: Make) -> None:
    def swap_one(config: StreamConfig) -> Iterator[Unit]:
        for unit in units(config):
            ids = unit.record_ids.copy()
            if unit.step == 2 and (ids >= 0).sum() > 1:
                ids[0] = ids[1]
            yield replace(unit, record_ids=ids)

    with pytest.raises(DeliveryError, match="not exactly the plan's"):
        run(settings("private"), swap_one)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"phase": {"kind": "public", "privacy": None, "batch_size": 24}}, "takes public sets"),
        ({"seed": 3}, "is private: a seeded run has no guarantee"),
        ({"domain": "another"}, "must compose in one ledger"),
    ],
)
def test_private_data_is_refused_where_it_has_no_guarantee(
    settings: Make, private_set: str, changes: dict[str, Any], message: str
) -> None:
    if "phase" in changes:
        made = settings("public", dataset_root=private_set)
    else:
        made = settings("private", **changes)
    with pytest.raises(ValueError, match=message):
        run(made)


def tamper(settings: PhaseSettings, **facts: Any) -> None:
    """Other facts in the newest checkpoint, whose files are left as they are."""
    latest = latest_checkpoint(Location(settings.output))
    assert latest is not None
    place = latest / "checkpoint.json"
    content = json.loads(place.read_text())
    content["facts"].update(facts)
    place.write_text(json.dumps(content))


@pytest.mark.parametrize(
    ("facts", "message"),
    [
        ({"ledger_head": None}, "keeps no ledger head"),
        ({"step": 1}, "does not name the weights"),
        ({"step": 3}, "does not name the weights"),
        ({"ledger_head": [1, "ab" * 32]}, "does not contain the head"),
    ],
)
def test_tampered_checkpoints_are_not_resumed(
    settings: Make, facts: dict[str, Any], message: str
) -> None:
    """Nothing is charged for what could not be stated afterwards."""
    made = settings("private")
    with pytest.raises(Crash):
        run(made, crash_at(3))
    tamper(made, **facts)
    ledger = Ledger(made.ledger_home, made.domain)
    entries = len(ledger.entries())
    with pytest.raises(ValueError, match=message):
        run(made)
    assert len(ledger.entries()) == entries


def test_nothing_is_shown_before_it_is_on_record(
    settings: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = settings("private")
    ledger = Ledger(made.ledger_home, made.domain)
    written: list[int] = []

    def is_on_record(step: int) -> bool:
        (account,) = ledger.accounts()
        return step in {known for known, _ in account.weights.values()}

    def write(self: TensorBoardLog, metrics: PublicMetrics) -> None:
        assert is_on_record(metrics.step)
        written.append(metrics.step)

    monkeypatch.setattr(TensorBoardLog, "write", write)

    def show(metrics: PublicMetrics) -> None:
        assert is_on_record(metrics.step) and metrics.step in written

    run_phase(made, Ranks(torch.device("cpu")), units, show)
    assert written == [2, 4, 6]


def test_held_out_loss_of_a_private_set_is_refused(settings: Make, private_set: str) -> None:
    with pytest.raises(ValueError, match="is a release"):
        run(settings("private", held_out_root=private_set))


def test_another_mechanism_cannot_continue_a_phase(settings: Make) -> None:
    made = settings("private")
    with pytest.raises(Crash):
        run(made, crash_at(3))
    assert made.mechanism is not None
    weaker = replace(made, mechanism=replace(made.mechanism, noise_multiplier=0.5))
    with pytest.raises(ValueError, match="another recipe or mechanism"):
        run(weaker)


def test_settings_survive_the_way_to_a_worker(settings: Make) -> None:
    for kind in ("public", "private"):
        made = settings(kind)
        assert PhaseSettings.from_json(made.to_json()) == made
