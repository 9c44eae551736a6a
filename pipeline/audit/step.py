"""The real private step, run over canaries whose gradients are known.

A canary's image is a one-hot picture; the model is two linear layers that read it, and a third that
never sees anything. So canary i's gradient is s_i (e_i, e_i, 0): canaries are orthogonal, and what
the released vector says in direction i follows a law that can be written down by hand.

Sampler, engine, clipping, noise and release are those of training (PrivateGradients).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from pipeline.data.stream import rank_slice
from pipeline.models.mae import MaskedAutoencoder
from pipeline.privacy.keys import AttemptKey
from pipeline.privacy.mechanism import Mechanism
from pipeline.recipe import Model, Phase
from pipeline.training.gradients import PrivateGradients
from pipeline.training.metrics import PrivateLog
from pipeline.training.settings import PhaseSettings

LONG, SHORT = 1e3, 0.25
"""Norms of the canaries' gradients over max_grad_norm."""
NUM_SILENT = 70_000
"""Coordinates that get noise and nothing else: more than one of the noise's chunks of 65,536."""


@dataclass(frozen=True, kw_only=True)
class AuditSettings:
    """What is audited, and how.

    Args:
        mechanism: the promise; its num_records are the canaries, its num_steps are run.
        clipping, gamma: as in the recipe.
        world_size: ranks that the step's records are dealt to (all in this process).
        microbatch_size: rows of one pass.
        seed: pins the attempt; None draws a key from the operating system.
        is_included: bool [N], which canaries are there at all; the others are the null record.
    """

    mechanism: Mechanism
    clipping: str = "flat"
    gamma: float = 0.01
    world_size: int = 2
    microbatch_size: int = 16
    seed: int | None = None
    is_included: npt.NDArray[np.bool_] | None = field(default=None, repr=False)

    @property
    def num_canaries(self) -> int:
        """N."""
        assert self.mechanism.num_records is not None
        return self.mechanism.num_records

    def key(self) -> AttemptKey:
        """The attempt's key."""
        if self.seed is None:
            return AttemptKey.from_os_entropy()
        return AttemptKey.seeded(self.seed)

    def norms(self) -> npt.NDArray[np.float64]:
        """Norm of each canary's gradient: nine of ten are far too long, one is short; [N].

        The last canary's is not a number.
        """
        relative = np.where(np.arange(self.num_canaries) % 10 == 9, SHORT, LONG)
        relative[-1] = np.nan
        return relative * self.mechanism.max_grad_norm

    def contributions(self) -> npt.NDArray[np.float64]:
        """What each canary may add to the sum, in units of the noise's standard deviation; [N].

        Written down by hand, from the papers and not from the code that is audited.
        """
        bound, norms = self.mechanism.max_grad_norm, self.norms()
        if self.clipping == "automatic":
            clipped = bound * norms / (norms + self.gamma)
        else:
            clipped = np.minimum(norms, bound)
        clipped[~np.isfinite(norms)] = 0.0
        if self.is_included is not None:
            clipped[~self.is_included] = 0.0
        return clipped / (self.mechanism.noise_multiplier * bound)


@dataclass(frozen=True, kw_only=True)
class Observation:
    """What an attempt delivered and released.

    Attributes:
        settings: what was run.
        delivered: by step and rank, the record ids that reached the model.
        responses: the release in each canary's direction, in noise standard deviations.
        residuals: by step, the release less what the delivered canaries should have added, in noise
            standard deviations; float64 [2 N + NUM_SILENT].
        released: by step, B x the released vector, float32, as it came.
    """

    settings: AuditSettings
    delivered: Sequence[Sequence[npt.NDArray[np.int64]]]
    responses: npt.NDArray[np.float64]
    residuals: Sequence[npt.NDArray[np.float64]]
    released: Sequence[npt.NDArray[np.float32]]


class CanaryModel(nn.Module):
    """Loss of a one-hot picture: the sum of its entries in two weight vectors."""

    def __init__(self, num_canaries: int) -> None:
        super().__init__()
        self.num_canaries = num_canaries
        self.first = nn.Linear(num_canaries, 1, bias=False)
        self.second = nn.Linear(num_canaries, 1, bias=False)
        self.silent = nn.Linear(1, NUM_SILENT, bias=False)

    def forward(self, images_M3HW: Tensor, mask_uniforms: Tensor) -> Tensor:
        """Loss of each image, [M]."""
        rows_MN = images_M3HW.flatten(1)[:, : self.num_canaries]
        nothing_M1 = torch.zeros_like(rows_MN[:, :1])
        seen_M = (self.first(rows_MN) + self.second(rows_MN)).squeeze(1)
        return seen_M + self.silent(nothing_M1).sum(1)


def phase_settings(settings: AuditSettings) -> PhaseSettings:
    """Settings of a private phase with this mechanism; nothing of it is written anywhere."""
    mechanism = settings.mechanism
    phase = Phase.model_validate(
        {
            "name": "audit",
            "kind": "private",
            "data": "canaries",
            "steps": mechanism.num_steps,
            "optimizer": {"learning_rate": 1.0},
            "microbatch_size": settings.microbatch_size,
            "privacy": {
                "noise_multiplier": mechanism.noise_multiplier,
                "max_grad_norm": mechanism.max_grad_norm,
                "clipping": settings.clipping,
                "gamma": settings.gamma,
                "expected_batch_size": mechanism.expected_batch_size,
            },
        }
    )
    return PhaseSettings(
        run="audit",
        phase=phase,
        model=Model(),
        recipe_digest="0" * 64,
        mechanism=mechanism,
        dataset_root="",
        held_out_root=None,
        output="",
        init_from=None,
        ledger_home="",
        domain="audit",
    )


def observe(
    settings: AuditSettings, *, num_steps: int | None = None, rank: int | None = None
) -> Observation:
    """Runs `num_steps` (default: all) steps of an attempt and keeps what came out.

    Args:
        rank: this process's, where it is one of several; None takes every rank's share here.

    Raises:
        whatever the step raises: an audit takes that as a failed check.
    """
    mechanism, num = settings.mechanism, settings.num_canaries
    key = settings.key()
    plan = mechanism.plan(key.sampling_key(), num_records=num)
    model = CanaryModel(num)
    gradients = PrivateGradients(
        cast(MaskedAutoencoder, model), phase_settings(settings), plan, key, PrivateLog(None, "")
    )
    expected = settings.contributions() / math.sqrt(2)
    delivered, responses, residuals, released = [], [], [], []
    try:
        for step in range(mechanism.num_steps if num_steps is None else num_steps):
            gradients.begin_step(step)
            step_ids = plan.record_ids(step)
            shares = [
                rank_slice(step_ids, rank, settings.world_size)
                for rank in range(settings.world_size)
            ]
            for share in shares if rank is None else [shares[rank]]:
                _accumulate(settings, gradients, share)
            flat = gradients.finish_step(step).flat.numpy() * np.float32(
                mechanism.expected_batch_size
            )
            relative = flat.astype(np.float64) / mechanism.noise_std
            halves = relative[:num], relative[num : 2 * num]
            responses.append((halves[0] + halves[1]) / math.sqrt(2))
            added = np.bincount(np.concatenate(shares), minlength=num) * expected
            residual = relative.copy()
            residual[:num] -= added
            residual[num : 2 * num] -= added
            residuals.append(residual)
            released.append(flat)
            delivered.append(shares)
    finally:
        gradients.close()
    return Observation(
        settings=settings,
        delivered=delivered,
        responses=np.array(responses),
        residuals=residuals,
        released=released,
    )


def _accumulate(
    settings: AuditSettings, gradients: PrivateGradients, ids: npt.NDArray[np.int64]
) -> None:
    """One rank's share in padded microbatches, at least one, as the stream cuts it."""
    size, num = settings.microbatch_size, settings.num_canaries
    side = math.ceil(math.sqrt(num / 3))
    scale = torch.from_numpy(settings.norms() / math.sqrt(2)).float()
    for start in range(0, max(len(ids), 1), size):
        rows = ids[start : start + size]
        images = torch.zeros(size, 3 * side * side)
        weights = torch.zeros(size)
        kept = torch.from_numpy(rows)
        images[torch.arange(len(rows)), kept] = scale[kept]
        weights[: len(rows)] = 1.0
        if settings.is_included is not None:
            weights[: len(rows)] = torch.from_numpy(settings.is_included[rows]).float()
        gradients.accumulate(images.view(size, 3, side, side), torch.zeros(size, 1), weights)
