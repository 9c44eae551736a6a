"""What may be seen of a phase while it trains, and the private log kept apart.

Public: the step, epsilon so far, the learning rate and the loss on a held-out set marked public; of
public phases also images/s over a whole checkpoint window and the training loss.
Private: losses, gradient norms, realised batch sizes, clip fractions, timings, failures. They go to
the private log and nowhere else.
"""

from __future__ import annotations

import json
import math
import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tensorboardX import SummaryWriter
from torch import Tensor

from pipeline.storage import Location


@dataclass(frozen=True, kw_only=True)
class PublicMetrics:
    """One line per checkpoint; every field is public or follows from public facts.

    Args:
        step: logical steps done.
        learning_rate: of the last step.
        epsilon: spent by this run so far (everything charged), None for a public phase.
        images_per_second: batch size x steps / seconds of the window, two digits; public phases
            only, for a duration tells of the realised batches.
        held_out_loss: mean loss on public held-out images, None if the recipe names none.
        train_loss: mean training loss of the window; public phases only.
    """

    step: int
    learning_rate: float
    epsilon: float | None
    images_per_second: float | None
    held_out_loss: float | None
    train_loss: float | None = None


def two_digits(value: float) -> float:
    """Rounded to two significant digits."""
    return float(f"{value:.1e}")


class TensorBoardLog:
    """Public metrics as TensorBoard scalars, on local storage only.

    Times are left out (the step stands in their place): exact durations are private.
    """

    def __init__(self, folder: Location) -> None:
        self._writer = SummaryWriter(str(folder.local_path)) if folder.is_local else None

    def write(self, metrics: PublicMetrics) -> None:
        """Add every number of the line under its own name."""
        if self._writer is None:
            return
        for name, value in asdict(metrics).items():
            if name != "step" and value is not None:
                self._writer.add_scalar(name, value, metrics.step, walltime=metrics.step)
        self._writer.flush()

    def close(self) -> None:
        """Flush and close."""
        if self._writer is not None:
            self._writer.close()


class PrivateLog:
    """Private facts of a private phase, one JSON line a step, readable by the owner only (0600).

    Args:
        folder: a local folder, or None to keep nothing.

    Guarantees:
        1. Nothing given to it reaches the console, the report or a checkpoint
           (test_nothing_private_is_shown, test_no_canary_leaves).
        2. The file's mode is 0600 from its creation on, and its folder's 0700
           (test_private_log_is_for_its_owner).
    """

    def __init__(self, folder: Path | None, name: str) -> None:
        self._stream = None
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            folder.chmod(0o700)
            path = folder / f"{name}.jsonl"
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            os.fchmod(descriptor, 0o600)
            self._stream = os.fdopen(descriptor, "a")
        self._losses: list[Tensor] = []
        self._block_norms: list[Tensor] = []
        self._weights: list[Tensor] = []
        self._started = time.monotonic()

    def observe(self, losses: Tensor, block_norms: Tensor, weights: Tensor) -> None:
        """Keep what one microbatch of M images showed; nothing is read back from the device here.

        Args:
            losses: [M].
            block_norms: of every block that is clipped by itself, [M, K].
            weights: [M]; 0 = padding.
        """
        if self._stream is not None:
            self._losses.append(losses.detach())
            self._block_norms.append(block_norms.detach())
            self._weights.append(weights.detach())

    def end_step(self, step: int, max_grad_norm: float) -> None:
        """Write the step's line."""
        if self._stream is None:
            return
        line: dict[str, Any] = {"step": step, "seconds": time.monotonic() - self._started}
        weights = _joined(self._weights)
        losses = _joined(self._losses)[weights > 0]
        num_blocks = self._block_norms[0].shape[1] if self._block_norms else 1
        block_norms = _joined(self._block_norms).reshape(-1, num_blocks)[weights > 0]
        norms = np.sqrt(np.square(block_norms).sum(axis=1))
        finite = np.isfinite(losses) & np.isfinite(norms)
        line |= {"num_images": len(losses), "num_not_finite": int((~finite).sum())}
        if finite.any():
            bound = max_grad_norm / math.sqrt(num_blocks)
            line |= {
                "loss": float(losses[finite].mean()),
                "norm_quartiles": np.quantile(norms[finite], [0.25, 0.5, 0.75]).tolist(),
                "clipped_fraction": float((block_norms[finite] > bound).mean()),
            }
        self._stream.write(json.dumps(line) + "\n")
        self._stream.flush()
        self._losses, self._block_norms, self._weights = [], [], []
        self._started = time.monotonic()

    def write(self, **facts: Any) -> None:
        """Write one line of private facts (a storage fault's shard and record, say)."""
        if self._stream is not None:
            self._stream.write(json.dumps(facts, default=str) + "\n")
            self._stream.flush()

    def close(self) -> None:
        """Close the file."""
        if self._stream is not None:
            self._stream.close()


def _joined(tensors: list[Tensor]) -> np.ndarray:
    return torch.cat(tensors).double().cpu().numpy() if tensors else np.zeros(0)
