"""Each planted fault is caught by a named check; the honest step passes, seed after seed."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from faults import (
    FAULTS,
    blocks_without_sqrt,
    factors_of_another_block,
    views_clipped_one_by_one,
)

import pipeline.audit
from pipeline.audit import AuditSettings, CheckResult, check_observation, check_step, observe
from pipeline.audit.lower_bound import one_run_lower_bound
from pipeline.audit.phase_check import check_phase
from pipeline.privacy.accountant import epsilon_of
from pipeline.privacy.mechanism import Mechanism

MECHANISM = Mechanism(
    num_records=800,
    expected_batch_size=80,
    sampling_probability=0.1,
    noise_multiplier=0.7,
    max_grad_norm=0.5,
    num_steps=48,
    delta=1e-3,
)
SETTINGS = AuditSettings(mechanism=MECHANISM, seed=0, microbatch_size=64)


def everything(settings: AuditSettings) -> list[CheckResult]:
    """All checks; an attempt that cannot run has failed one, `finishes`."""
    try:
        results = check_observation(observe(settings))
    except ValueError as error:
        detail = type(error).__name__
        results = [CheckResult(name="finishes", passed=False, p_value=None, detail=detail)]
    return [*results, *check_step(settings), check_phase()]


@pytest.mark.parametrize("first", range(0, 50, 10))
def test_the_honest_step_passes(first: int) -> None:
    """50 of 50 fixed seeds, at a family error of 1e-3 a seed."""
    for seed in range(first, first + 10):
        failed = [
            c for c in check_observation(observe(replace(SETTINGS, seed=seed))) if not c.passed
        ]
        assert not failed, f"seed {seed}"


@pytest.mark.parametrize(
    ("clipping", "clipping_style", "views_per_image"),
    [
        ("flat", "all-layer", 1),
        ("automatic", "all-layer", 1),
        ("global", "all-layer", 1),
        ("flat", "per-layer", 1),
        ("automatic", "per-block", 3),
        ("global", "per-block", 1),
    ],
)
def test_the_honest_step_passes_every_kind_of_check(
    clipping: str, clipping_style: str, views_per_image: int
) -> None:
    settings = replace(
        SETTINGS,
        clipping=clipping,
        clipping_style=clipping_style,
        views_per_image=views_per_image,
    )
    assert [c for c in everything(settings) if not c.passed] == []


CAUGHT: dict[str, list[str]] = {}


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_are_caught(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    FAULTS[fault](monkeypatch)
    names = [check.name for check in everything(SETTINGS) if not check.passed]
    assert names, f"no check notices: {fault}"
    # These two draw keys of the operating system: where others notice, whether they do is chance.
    CAUGHT[fault] = [name for name in names if name not in ("attempts", "steps")] or names


BLOCK_FAULTS = {
    "every block clipped to the whole bound": blocks_without_sqrt,
    "the factor of another block": factors_of_another_block,
    "views clipped one by one and added": views_clipped_one_by_one,
}


@pytest.mark.parametrize("clipping", ["flat", "automatic"])
@pytest.mark.parametrize("fault", BLOCK_FAULTS)
def test_faults_of_blocks_and_views_are_caught(
    fault: str, clipping: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    BLOCK_FAULTS[fault](monkeypatch)
    settings = replace(SETTINGS, clipping=clipping, clipping_style="per-block", views_per_image=2)
    names = [check.name for check in everything(settings) if not check.passed]
    assert "contribution" in names


@pytest.mark.parametrize("fault", ["rate x 1.1", "batches truncated at B", "noise x 0.99"])
def test_subtle_faults_need_no_luck(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault that one seed's coins happen to show is not one that the audit finds."""
    FAULTS[fault](monkeypatch)
    for seed in (101, 102, 103):
        found = check_observation(observe(replace(SETTINGS, seed=seed)))
        assert not all(check.passed for check in found), f"seed {seed}"


def test_the_table_in_the_readme_is_what_was_caught(request: pytest.FixtureRequest) -> None:
    """Printed by `pytest -s`, and kept in pipeline/audit/README.md."""
    if set(CAUGHT) != set(FAULTS):
        pytest.skip("needs the tests above in the same session")
    rows = [f"| {fault} | {', '.join(names)} |" for fault, names in CAUGHT.items()]
    print("\n".join(["", "| planted fault | caught by |", "|---|---|", *rows]))
    readme = (Path(pipeline.audit.__file__).parent / "README.md").read_text()
    found = re.findall(r"^\| (?!planted|---)(.*) \| (.*) \|$", readme, re.MULTILINE)
    assert found == [(fault, ", ".join(names)) for fault, names in CAUGHT.items()]


def bound_and_claim(seed: int) -> tuple[float, float]:
    """The one-run lower bound over 800 canaries, and what the accountant claims."""
    mechanism = replace(
        MECHANISM,
        num_records=800,
        expected_batch_size=80,
        noise_multiplier=3.0,
        num_steps=30,
        delta=1e-5,
    )
    included = np.random.default_rng(seed).random(800) < 0.5
    settings = AuditSettings(mechanism=mechanism, seed=seed, is_included=included)
    seen = observe(settings)
    usable = np.isfinite(settings.norms())
    scores = np.nan_to_num(seen.responses.sum(0)[usable])
    bound = one_run_lower_bound(scores, included[usable], delta=1e-5)
    return bound.epsilon, epsilon_of([(mechanism, 30)], 1e-5).value


def test_the_lower_bound_is_below_the_claim() -> None:
    for seed in range(3):
        lower, claimed = bound_and_claim(seed)
        assert lower <= claimed


@pytest.mark.parametrize("fault", ["no noise", "no clip"])
def test_the_lower_bound_refutes_the_claim(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    FAULTS[fault](monkeypatch)
    lower, claimed = bound_and_claim(0)
    assert lower > claimed, f"{lower} proves nothing against {claimed}"
