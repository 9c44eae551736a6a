"""The step benchmark runs, says what it must, and compares like with like; no speed is asserted."""

from __future__ import annotations

import copy
import importlib
import json
import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from pipeline.dpsgd import (
    FlatClipping,
    ParameterLayout,
    ReferenceSum,
    reference_clipped_sum,
)

ROOT = Path(__file__).parent.parent
CLIPPED = ("ours", "ours_ghost", "ours_direct", "vmap", "opacus_hooks", "opacus_ghost")


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> Any:
    """benchmarks/step.py as a module."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("step")


def test_every_row_has_its_numbers(
    benchmark: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A row has what is asked of it; what was not measured is null, with the reason."""
    benchmark.main(
        [
            *("--sizes", "micro", "--microbatch", "2", "--rounds", "2", "--logical-batch", "4"),
            *("--methods", "ours", "ours_bf16", "ours_compiled", "whole_ours"),
            *("--without", "memory"),
            *("--json", str(tmp_path / "rows.json"), "--markdown", str(tmp_path / "rows.md")),
        ]
    )
    rows = {row["method"]: row for row in json.loads((tmp_path / "rows.json").read_text())}
    assert list(rows) == [
        *("plain", "ours", "plain_bf16", "ours_bf16"),
        *("ours_compiled", "whole_plain", "whole_ours"),
    ]
    for name, row in rows.items():
        assert (row["size"], row["microbatch"], row["rounds"]) == ("micro", 2, 2)
        assert row["memory_ratio"] is None and row["reason"]
        for key in ("cpu_ratio", "wall_ratio", "cpu_seconds", "wall_seconds"):
            if row[key] is None:
                assert name == "ours_compiled" and row["reason"]
            else:
                low, high = row[f"{key}_quartiles"]
                assert math.isfinite(row[key]) and 0 < low <= row[key] <= high
    assert rows["ours_bf16"]["baseline"] == "plain_bf16"
    assert rows["whole_ours"]["baseline"] == "whole_plain"
    assert "2 microbatches" in rows["whole_ours"]["note"]
    assert rows["plain"]["cpu_ratio"] == rows["plain"]["flop_ratio"] == 1.0
    assert 1.0 < rows["ours"]["flop_ratio"] < 1.1
    table = (tmp_path / "rows.md").read_text()
    assert table.strip() == capsys.readouterr().out.strip()
    assert table.count("\n| micro | 2 | ") == len(rows)


def test_memory_is_measured_in_its_own_process(benchmark: Any) -> None:
    """At least the gradients, which every step leaves behind; ours keeps them in its sum."""
    options = benchmark.parse(["--sizes", "test", "--microbatch", "4"])
    for name in ("plain", "ours"):
        num_bytes = benchmark.memory_elsewhere(name, "test", 4, options)
        model = benchmark.make_problem("test", 1, "cpu", 1).model
        gradients = 4 * sum(parameter.numel() for parameter in model.parameters())
        assert gradients < num_bytes < 200 * gradients


def test_memory_that_cannot_be_measured_has_a_reason(benchmark: Any) -> None:
    """A process that fails is told, not counted."""
    options = benchmark.parse(["--sizes", "micro", "--microbatch", "2"])
    with pytest.raises(benchmark.Unavailable, match="no-such-size"):
        benchmark.memory_elsewhere("plain", "no-such-size", 2, options)


@pytest.mark.parametrize("name", CLIPPED)
def test_all_methods_compute_the_same_clipped_sum(benchmark: Any, name: str) -> None:
    """What is compared in speed is equal in its result, on what all of them train."""
    if name.startswith("opacus"):
        pytest.importorskip("opacus")
    problem = benchmark.make_problem("micro", 5, "cpu", 5)
    benchmark.peers.freeze_bare_parameters(problem.model)
    problem.images.mul_(torch.linspace(0.5, 2.0, 5).view(-1, 1, 1, 1))
    clip_norm = float(_reference(problem).norms_M.median())
    layout = ParameterLayout.of(problem.model)
    two_images = 2 * 4 * layout.num_coordinates
    problem = replace(problem, max_grad_norm=clip_norm, per_image_bytes=two_images)
    reference = _reference(problem)
    assert (reference.factors_M == 1).any() and (reference.factors_M < 0.9).any()
    method = benchmark.METHODS[name](problem)
    method.step()
    sums = method.sums()
    for parameter, expected in layout.views(reference.flat_sum_P).items():
        found = sums.pop(parameter).double()
        assert (found - expected).norm() < 1e-4 * expected.norm() + 1e-6 * clip_norm
    assert not sums


def _reference(problem: Any) -> ReferenceSum:
    model = copy.deepcopy(problem.model).double()
    images, uniforms = problem.images.double(), problem.uniforms
    return reference_clipped_sum(
        model,
        lambda image: model(images[[image]], uniforms[[image]]).squeeze(0),
        len(images),
        FlatClipping(problem.max_grad_norm),
    )


def test_a_peer_that_is_not_installed_is_skipped_aloud(
    benchmark: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The other rows are measured all the same."""
    monkeypatch.setitem(sys.modules, "opacus", None)
    shape = ["--sizes", "micro", "--microbatch", "2", "--rounds", "1", "--without", "memory"]
    benchmark.main([*shape, "--methods", "opacus_ghost"])
    shown = capsys.readouterr().out
    assert "`opacus_ghost` | `plain` | – | – |" in shown
    assert "Opacus cannot be imported" in shown and ".[bench]" in shown


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--sizes", "giant"], ["giant", "nano", "base"]),
        (["--methods", "ours", "magic"], ["magic", "plain", "opacus_ghost"]),
        (["--microbatch", "0"], ["--microbatch", "'0'", "at least 1"]),
        (["--rounds", "many"], ["--rounds", "'many'", "at least 1"]),
        (["--microbatch", "16", "--logical-batch", "40"], ["40", "multiple", "16"]),
        (["--per-image-gib", "0"], ["--per-image-gib", "greater than 0"]),
        (["--device", "tpu"], ["tpu", "cpu", "cuda"]),
        (["--json", "no/such/folder/rows.json"], ["--json", "no/such/folder"]),
    ],
)
def test_arguments_that_do_not_fit_are_refused_by_name(
    benchmark: Any, capsys: pytest.CaptureFixture[str], arguments: list[str], told: list[str]
) -> None:
    """Each message names the argument, its value and what is allowed."""
    with pytest.raises(SystemExit) as ended:
        benchmark.parse(arguments)
    assert ended.value.code == 2
    message = capsys.readouterr().err
    assert all(word in message for word in told)


def test_cuda_is_refused_where_there_is_none(
    benchmark: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before anything is built."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit):
        benchmark.parse(["--device", "cuda"])
    assert "no CUDA device" in capsys.readouterr().err
