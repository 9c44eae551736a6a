"""A whole small phase on public pictures: every step that ran was paid for, and no other ran."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch

from pipeline.audit.checks import CheckResult
from pipeline.data.prepare import PrepareConfig, prepare
from pipeline.data.shards import ShardStore
from pipeline.data.stream import StreamConfig, Unit, thread_pool_units
from pipeline.privacy.ledger import Ledger
from pipeline.privacy.mechanism import Mechanism
from pipeline.recipe import Model, Phase
from pipeline.storage import Location
from pipeline.training.phase import run_phase
from pipeline.training.ranks import Ranks
from pipeline.training.settings import PhaseSettings

_NUM_STEPS, _INTERVAL, _BATCH_SIZE = 5, 2, 8


def check_phase() -> CheckResult:
    """Runs five steps of a real phase and compares images, ledger and checkpoint.

    Guarantees:
        1. A step more than promised, or one that was not charged, is found
           (test_planted_faults_are_caught).
    """
    with tempfile.TemporaryDirectory(prefix="dp-pretrain-audit-") as folder:
        try:
            executed, charged, step = _run(Path(folder))
        except Exception as error:
            detail = f"raised {type(error).__name__}"
            return CheckResult(name="steps", passed=False, p_value=None, detail=detail)
    return CheckResult(
        name="steps",
        passed=executed == list(range(_NUM_STEPS)) and charged == step == _NUM_STEPS,
        p_value=None,
        detail=f"{len(executed)} ran, {charged} charged, {_NUM_STEPS} promised",
    )


def _run(folder: Path) -> tuple[list[int], int, int]:
    """(steps whose images were asked for, steps charged, step of the last checkpoint)."""
    root = Location(str(folder / "pictures"))
    prepare(
        PrepareConfig(
            name="pictures",
            source="synthetic:textures?num_images=64&size=16&seed=0",
            visibility="public",
            image_short_side=16,
        ),
        root,
        num_workers=1,
    )
    num = ShardStore(root).num_records
    phase = Phase.model_validate(
        {
            "name": "audit",
            "kind": "private",
            "data": "pictures",
            "steps": _NUM_STEPS,
            "optimizer": {"learning_rate": 1e-3},
            "checkpoint_interval": _INTERVAL,
            "microbatch_size": 8,
            "privacy": {"noise_multiplier": 1.0, "expected_batch_size": _BATCH_SIZE},
        }
    )
    mechanism = Mechanism(
        num_records=num,
        expected_batch_size=_BATCH_SIZE,
        sampling_probability=_BATCH_SIZE / num,
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        num_steps=_NUM_STEPS,
        reserve_steps=_INTERVAL,
        delta=1e-3,
    )
    settings = PhaseSettings(
        run="audit",
        phase=phase,
        model=Model(size="micro", image_size=16, patch_size=4),
        recipe_digest="0" * 64,
        mechanism=mechanism,
        dataset_root=str(root),
        held_out_root=None,
        output=str(folder / "phase"),
        init_from=None,
        ledger_home=str(folder / "ledger"),
        domain="audit",
    )
    executed: list[int] = []

    def open_units(config: StreamConfig) -> Iterator[Unit]:
        for unit in thread_pool_units(config, 0, 1):
            if unit.step not in executed:
                executed.append(unit.step)
            yield unit

    outcome = run_phase(settings, Ranks(torch.device("cpu")), open_units, lambda metrics: None)
    charged = sum(steps for _, steps in Ledger(settings.ledger_home or "", "audit").spent())
    return executed, charged, outcome.step
