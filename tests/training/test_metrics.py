"""Public metrics are rounded, the private log is complete and apart."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch

from pipeline.storage import Location
from pipeline.training.metrics import PrivateLog, PublicMetrics, TensorBoardLog, two_digits


def test_two_digits() -> None:
    assert [two_digits(v) for v in (1234.5, 98.76, 0.0123)] == [1200.0, 99.0, 0.012]


def test_private_log_tells_the_operator_what_happened(tmp_path: Path) -> None:
    log = PrivateLog(tmp_path / "logs", "run-phase")
    nan = float("nan")
    log.observe(torch.tensor([1.0, nan]), torch.tensor([[3.0], [2.0]]), torch.tensor([1.0, 1.0]))
    log.observe(torch.tensor([5.0, 7.0]), torch.tensor([[0.5], [9.0]]), torch.tensor([1.0, 0.0]))
    log.end_step(4, max_grad_norm=1.0)
    log.end_step(5, max_grad_norm=1.0)
    log.close()
    first, second = map(
        json.loads, (tmp_path / "logs" / "run-phase.jsonl").read_text().split("\n")[:2]
    )
    assert first["step"] == 4 and first["num_images"] == 3 and first["num_not_finite"] == 1
    assert first["loss"] == 3.0 and first["clipped_fraction"] == 0.5
    np.testing.assert_allclose(first["norm_quartiles"], [1.125, 1.75, 2.375])
    assert second["num_images"] == 0 and "loss" not in second


def test_private_log_of_blocks(tmp_path: Path) -> None:
    """The norm is that of the whole gradient; a block counts as clipped beyond R / sqrt(K)."""
    log = PrivateLog(tmp_path / "logs", "run-phase")
    log.observe(torch.ones(1), torch.tensor([[3.0, 4.0, 0.4, 0.6]]), torch.ones(1))
    log.end_step(0, max_grad_norm=1.0)
    log.close()
    line = json.loads((tmp_path / "logs" / "run-phase.jsonl").read_text())
    np.testing.assert_allclose(line["norm_quartiles"], 3 * [(9 + 16 + 0.16 + 0.36) ** 0.5])
    assert line["clipped_fraction"] == 0.75


def test_without_a_folder_nothing_is_kept() -> None:
    log = PrivateLog(None, "x")
    log.observe(torch.ones(1), torch.ones(1, 1), torch.ones(1))
    log.end_step(0, 1.0)
    log.close()


def test_tensorboard_gets_public_scalars(tmp_path: Path) -> None:
    board = TensorBoardLog(Location(str(tmp_path / "board")))
    board.write(
        PublicMetrics(
            step=2, learning_rate=0.1, epsilon=None, images_per_second=9.0, held_out_loss=0.5
        )
    )
    board.close()
    (events,) = (tmp_path / "board").iterdir()
    content = events.read_bytes()
    assert b"held_out_loss" in content and b"epsilon" not in content
    TensorBoardLog(Location("s3://bucket/x")).close()
