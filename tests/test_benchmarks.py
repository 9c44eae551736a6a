"""The step benchmark runs, says what it could not do, and compares equals; no speed is asserted."""

from __future__ import annotations

import copy
import importlib
import json
import math
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from pipeline.dpsgd import FlatClipping, ParameterLayout, ReferenceSum, reference_clipped_sum

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
TINY = ["--sizes", "micro", "--microbatch", "2", "--image-size", "64", "--logical-batch", "4"]
KEYS = {"size", "microbatch", "method", "cpu_ratio", "wall_ratio", "memory_ratio", "flop_ratio"}
KEYS |= {"cpu_ratio_quartiles", "wall_ratio_quartiles", "memory_bytes", "torch", "threads", "cpu"}
PEERS = ("opacus_hooks", "opacus_ghost", "vmap", "vmap_chunked")


@pytest.fixture
def step(monkeypatch: pytest.MonkeyPatch) -> Any:
    """benchmarks/step.py."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("step")


def run(step: Any, tmp_path: Path, *arguments: str) -> tuple[dict[str, Any], str]:
    """Rows by method, and the table."""
    files = ["--json", str(tmp_path / "rows.json"), "--markdown", str(tmp_path / "table.md")]
    step.main([*TINY, *arguments, *files])
    rows = json.loads((tmp_path / "rows.json").read_text())
    return {row["method"]: row for row in rows}, (tmp_path / "table.md").read_text()


def test_rows_and_table(step: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every method that can be had here, each over its own baseline."""
    methods = ["ours", "ours_bf16", "whole_ours", "vmap_chunked", "opacus_ghost"]
    rows, table = run(
        step, tmp_path, "--methods", *methods, "--rounds", "2", "--no-memory", "--vmap-chunk", "1"
    )
    assert set(rows) == {"plain", "plain_bf16", "whole_plain", *methods}  # and the baselines
    for name, row in rows.items():
        assert row.keys() >= KEYS
        assert (row["size"], row["microbatch"], row["rounds"]) == ("micro", 2, 2)
        assert row["memory_ratio"] is None and "--no-memory" in row["reasons"]["memory_ratio"]
        if "skipped" in row["reasons"]:
            assert name == "opacus_ghost" and "[bench]" in row["reasons"]["skipped"]
            continue
        for ratio in ("cpu_ratio", "wall_ratio", "flop_ratio"):
            assert math.isfinite(row[ratio]) and row[ratio] > 0
        first, third = row["cpu_ratio_quartiles"]
        assert first <= row["cpu_ratio"] <= third
    for name in ("plain", "whole_plain"):
        assert rows[name]["cpu_ratio"] == rows[name]["flop_ratio"] == 1.0
    assert rows["whole_plain"]["flops"] == 2 * rows["plain"]["flops"]  # two microbatches
    assert rows["ours_bf16"]["baseline"] == "plain_bf16"
    peer = rows["opacus_ghost"]["flop_ratio"]
    assert peer is None or rows["ours"]["flop_ratio"] < peer  # None: not installed
    assert table.strip() == capsys.readouterr().out.strip()
    assert table.count("\n| micro | 2 | ") == len(rows)
    assert "a real one has 4,096" in table and "to plain_bf16" in table


def test_memory_of_a_step(step: Any) -> None:
    """In its own process: at least the gradients, which both keep, and not the libraries; what the
    profiler has counted is the same every time, and what is resident is more."""
    options = step.parse([*TINY, "--image-size", "224"])
    work = step.workload(options, "test", 4)
    gradients = 4 * sum(parameter.numel() for parameter in work.model.parameters())
    for method in ("plain", "ours", "opacus_ghost"):
        if method == "opacus_ghost" and not find_spec("opacus"):
            continue
        found = step.memory_of_a_child(method, options, "test", 4)
        assert gradients < found["memory_bytes"] < 100 * gradients
        again = step.most_allocated(method, replace(work, is_alone=True))
        assert found["memory_bytes"] == again
        assert 0.9 * found["memory_bytes"] < found["resident_bytes"] < 100 * gradients


def test_times_are_saved_before_memory_is_measured(
    step: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What ends the benchmark while it measures memory does not take the times along."""

    def end(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(step, "memory_of_a_child", end)
    with pytest.raises(KeyboardInterrupt):
        run(step, tmp_path, "--methods", "plain", "--rounds", "1")
    (row,) = json.loads((tmp_path / "rows.json").read_text())
    assert row["cpu_ratio"] == row["flop_ratio"] == 1.0
    assert "not yet measured" in row["reasons"]["memory_ratio"]


def test_memory_that_cannot_be_measured(
    step: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Null with the reason, in the words of the process that failed."""
    failing = tmp_path / "python"
    failing.write_text("#!/bin/sh\necho out of memory >&2; exit 137\n")
    failing.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(failing))
    options = step.parse(TINY)
    row = step.empty_row("plain", options, "micro", 2)
    step.add_memory({"plain": row}, options, "micro", 2)
    assert row["memory_bytes"] is None
    assert row["reasons"]["memory_ratio"].endswith("ended with 137: out of memory")


@pytest.mark.parametrize("method", ["ours", "ours_ghost", "ours_direct", *PEERS])
def test_all_compute_the_same_sum(step: Any, method: str) -> None:
    """What is timed equals the slow definition, of what the method trains.

    Half of the images are clipped. Ours aims a 4096th below the norm, the peers do not.
    """
    if method.startswith("opacus"):
        pytest.importorskip("opacus")
    options = step.parse([*TINY, "--vmap-chunk", "2"])
    work = step.workload(options, "micro", 5)
    images, uniforms = work.batch
    images.mul_(torch.linspace(0.5, 2, 5).view(5, 1, 1, 1))
    trained = copy.deepcopy(work.model)
    if method.startswith("opacus"):  # which is handed the model as it is
        trained.encoder.cls_token.requires_grad_(False)
        trained.mask_token.requires_grad_(False)

    def reference(max_grad_norm: float) -> ReferenceSum:
        return reference_clipped_sum(
            trained,
            lambda image: trained(images[[image]], uniforms[[image]]).squeeze(0),
            5,
            FlatClipping(max_grad_norm),
        )

    median = float(reference(1.0).norms_M.median())
    expected = reference(median)
    assert (expected.factors_M == 1).any() and (expected.factors_M < 0.9).any()
    clipping = replace(work, max_grad_norm=median)
    clipping.__dict__.update(model=work.model, batch=work.batch)  # the cached ones
    run_step = step.METHODS[method].make(clipping)
    run_step()
    sums = run_step()  # the second: what is timed
    views = ParameterLayout.of(trained).views(expected.flat_sum_P)
    assert sums.keys() == views.keys()
    for name, view in views.items():
        assert (sums[name] - view).norm() <= 3e-4 * view.norm() + 1e-6 * median


def test_a_peer_that_is_not_installed(
    step: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its row says how to get it; the others are measured."""
    monkeypatch.setitem(sys.modules, "opacus", None)
    rows, table = run(step, tmp_path, "--methods", "opacus_ghost", "--rounds", "1", "--no-memory")
    assert '".[bench]"' in rows["opacus_ghost"]["reasons"]["skipped"]
    assert rows["opacus_ghost"]["cpu_ratio"] is None and rows["plain"]["cpu_ratio"] == 1.0
    assert "| opacus_ghost | skipped: needs opacus" in table


def test_a_peer_that_fails(step: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Told where it is a peer; ours may not fail."""

    def make(work: Any) -> Any:
        raise RuntimeError("no rule\nfor this")

    work = step.workload(step.parse(TINY), "micro", 2)
    for name in ("vmap", "ours"):
        monkeypatch.setitem(step.METHODS, name, replace(step.METHODS[name], make=make))
    with pytest.raises(step.Unavailable, match=r"failed: RuntimeError: no rule$"):
        step.ready("vmap", work)
    with pytest.raises(RuntimeError, match="no rule"):
        step.ready("ours", work)


def test_rounds_are_interleaved(step: Any) -> None:
    """Every method once a round, another one first each time, after different ones."""
    calls: list[str] = []
    steps = {name: lambda name=name: calls.append(name) for name in "abc"}
    times = step.time_rounds(steps, 4, lambda: None)
    assert "".join(calls) == "abcacbcabcba"
    assert {name: len(rounds) for name, rounds in times.items()} == {"a": 4, "b": 4, "c": 4}


def test_a_ratio_is_that_of_the_same_round(step: Any) -> None:
    """A machine that slows down in one round slows both; the median ratio does not see it."""
    options = step.parse(TINY)
    rows = {name: step.empty_row(name, options, "micro", 2) for name in ("plain", "ours")}
    plain, ours = [(1.0, 1.0), (5.0, 8.0), (2.0, 2.0)], [(1.1, 2.0), (5.5, 8.0), (3.0, 2.0)]
    step.add_times(rows, {"plain": plain, "ours": ours}, options)
    row = rows["ours"]
    assert row["cpu_ratio"] == pytest.approx(1.1) and row["wall_ratio"] == pytest.approx(1.0)
    assert row["cpu_ratio_quartiles"] == pytest.approx([1.1, 1.3])
    assert row["cpu_seconds"] == 3.0


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--sizes", "giant"], ["--sizes", "giant", "nano", "base"]),
        (["--methods", "magic"], ["--methods", "magic", "plain", "opacus_ghost"]),
        (["--microbatch", "0"], ["--microbatch", "'0'", ">= 1"]),
        (["--rounds", "many"], ["--rounds", "'many'", ">= 1"]),
        (["--threads", "-1"], ["--threads", "'-1'", ">= 1"]),
        (["--vmap-chunk", "0"], ["--vmap-chunk", "'0'", ">= 1"]),
        (["--device", "tpu"], ["--device", "tpu", "cpu", "cuda"]),
        (["--image-size", "50"], ["--image-size", "50", "multiple"]),
        (
            ["--methods", "whole_ours", "--microbatch", "4", "3", "--logical-batch", "64"],
            ["--logical-batch is 64", "whole_ours", "multiple", "3"],
        ),
        (["--json", "no/such/rows.json"], ["--json", "no/such/rows.json", "make it first"]),
    ],
)
def test_bad_arguments_are_refused(
    step: Any, capsys: pytest.CaptureFixture[str], arguments: list[str], told: list[str]
) -> None:
    """Before anything is measured, in a sentence that names the field, its value and a remedy."""
    with pytest.raises(SystemExit) as end:
        step.parse(arguments)
    message = capsys.readouterr().err
    assert end.value.code == 2
    for word in told:
        assert word in message


def test_cuda_where_there_is_none(
    step: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Refused with the remedy."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit):
        step.parse(["--device", "cuda"])
    assert "use --device cpu" in capsys.readouterr().err
