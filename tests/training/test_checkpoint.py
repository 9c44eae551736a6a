"""Checkpoints are atomic, digested, and refuse damage."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from pipeline.storage import Location
from pipeline.training.checkpoint import (
    CheckpointError,
    CheckpointFacts,
    latest_checkpoint,
    load_checkpoint,
    prune,
    read_facts,
    save_checkpoint,
)


def facts(step: int) -> CheckpointFacts:
    return CheckpointFacts(
        step=step,
        finished=None,
        recipe_digest="r",
        mechanism_digest=None,
        ledger_head=(3, "d"),
        attempt=0,
        history=[{"step": step}],
        model={"size": "micro"},
        origin=["o"],
        lineage=[{"run": "r", "phase": "p", "domain": "d", "num_steps": 1}],
        guarantee="none needed (public data)",
    )


def write(folder: Location, step: int) -> str:
    weights = {"w": torch.full((2, 3), float(step))}
    return save_checkpoint(folder, weights, {"w|exp_avg": torch.ones(2, 3)}, lambda _: facts(step))


def test_round_trip(tmp_path: Path) -> None:
    folder = Location(str(tmp_path))
    digest = write(folder, 5)
    latest = latest_checkpoint(folder)
    assert latest is not None
    saved = load_checkpoint(latest)
    assert saved.facts == facts(5) == read_facts(latest)
    assert saved.weights_digest == digest
    assert torch.equal(saved.weights["w"], torch.full((2, 3), 5.0))
    assert list(saved.optimizer) == ["w|exp_avg"]


def test_a_folder_without_manifest_does_not_exist(tmp_path: Path) -> None:
    folder = Location(str(tmp_path))
    write(folder, 1)
    write(folder, 2)
    (tmp_path / "checkpoint-00000002" / "checkpoint.json").unlink()
    latest = latest_checkpoint(folder)
    assert latest is not None and latest.name == "checkpoint-00000001"


def test_a_ledger_is_told_before_the_checkpoint_exists(tmp_path: Path) -> None:
    folder = Location(str(tmp_path))

    def refuse(digest: str) -> CheckpointFacts:
        raise RuntimeError("the ledger is fenced")

    with pytest.raises(RuntimeError):
        save_checkpoint(folder, {"w": torch.zeros(1)}, {}, refuse)
    assert latest_checkpoint(folder) is None


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors", "checkpoint.json"])
def test_damage_is_refused(tmp_path: Path, name: str) -> None:
    folder = Location(str(tmp_path))
    write(folder, 1)
    path = tmp_path / "checkpoint-00000001" / name
    path.write_bytes(path.read_bytes()[:-9] + b"\0" * 9)
    with pytest.raises(CheckpointError):
        load_checkpoint(folder / "checkpoint-00000001")


def test_prune_keeps_the_newest(tmp_path: Path) -> None:
    folder = Location(str(tmp_path))
    for step in range(4):
        write(folder, step)
    prune(folder)
    assert [f.name for f in folder.list()] == ["checkpoint-00000002", "checkpoint-00000003"]


def test_empty_folder_has_none(tmp_path: Path) -> None:
    assert latest_checkpoint(Location(str(tmp_path / "none"))) is None
    with pytest.raises(CheckpointError, match="no finished checkpoint"):
        read_facts(Location(str(tmp_path / "none")))
