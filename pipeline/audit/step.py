"""The real private step, run over canaries whose gradients are known.

A canary's picture shows its number (pictures.py). The model reads it and makes it a one-hot row
for two linear layers, each a block of its own; a third never sees anything. So canary i's gradient
is s_i (e_i, e_i, 0): canaries are orthogonal, and what the released vector says in direction i
follows a law that can be written down by hand.

Sampler, stream, engine, clipping, noise and release are those of training (thread_pool_units,
PrivateGradients).
"""

from __future__ import annotations

import math
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from pipeline.audit.pictures import SIDE, canary_store, numbers_of
from pipeline.data.stream import DeliveryError, StreamConfig, Unit, thread_pool_units
from pipeline.models.mae import MaskedAutoencoder, normalise_images
from pipeline.privacy.keys import AttemptKey
from pipeline.privacy.mechanism import Mechanism
from pipeline.recipe import Model, Phase
from pipeline.training.gradients import PrivateGradients
from pipeline.training.metrics import PrivateLog
from pipeline.training.settings import PhaseSettings

LONG, SHORT = 1e3, 0.25
"""Norms of the canaries' gradients over max_grad_norm."""
HOSTILE = (1e30, math.inf, math.nan, 1e10, 0.0, 1e-30, -1e3, 1.001)
"""Norms over max_grad_norm that no honest picture has; less than 0 points the other way."""
_SILENT_SIDE = 265
NUM_SILENT = _SILENT_SIDE**2
"""Coordinates that get noise and nothing else: more than one of the noise's chunks of 65,536."""


@dataclass(frozen=True, kw_only=True)
class AuditSettings:
    """What is audited, and how.

    Args:
        mechanism: the promise; its num_records are the canaries, its num_steps are run.
        clipping, gamma, clipping_style, views_per_image: as in the recipe.
        world_size: ranks that the step's records are dealt to (all in this process).
        microbatch_size: rows of one pass.
        seed: pins the attempt; None draws a key from the operating system.
        is_included: bool [N], which canaries are there at all; the others are the null record.
        is_hostile: gradients of HOSTILE norms that all point the same way, so that they add up.
    """

    mechanism: Mechanism
    clipping: str = "flat"
    gamma: float = 0.01
    clipping_style: str = "all-layer"
    views_per_image: int = 1
    world_size: int = 2
    microbatch_size: int = 16
    seed: int | None = None
    is_included: npt.NDArray[np.bool_] | None = field(default=None, repr=False)
    is_hostile: bool = False

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

        Under global clipping, which drops the long ones, it is the other way round. The last
        canary's is not a number.
        """
        if self.is_hostile:
            return np.resize(HOSTILE, self.num_canaries) * self.mechanism.max_grad_norm
        is_tenth = np.arange(self.num_canaries) % 10 == 9
        relative = np.where(is_tenth == (self.clipping == "global"), LONG, SHORT)
        relative[-1] = np.nan
        return relative * self.mechanism.max_grad_norm

    def contributions(self) -> npt.NDArray[np.float64]:
        """What each canary may add to the sum, in units of the noise's standard deviation; [N].

        Written down by hand, from the papers and not from the code that is audited.
        """
        bound, norms = self.mechanism.max_grad_norm, np.abs(self.norms())
        norms[~np.isfinite(norms)] = 0.0
        # A gradient is half in each of two layers, and nothing in a third: three blocks, or one.
        num_equal, num_blocks = (1, 1) if self.clipping_style == "all-layer" else (2, 3)
        part, bound_of_part = norms / math.sqrt(num_equal), bound / math.sqrt(num_blocks)
        if self.clipping == "automatic":
            clipped = bound_of_part * part / (part + self.gamma)
        elif self.clipping == "global":
            clipped = np.where(part <= bound_of_part, part, 0.0)
        else:
            clipped = np.minimum(part, bound_of_part)
        clipped = clipped * math.sqrt(num_equal)
        if self.is_included is not None:
            clipped[~self.is_included] = 0.0
        return clipped / (self.mechanism.noise_multiplier * bound)


@dataclass(frozen=True, kw_only=True)
class Observation:
    """What an attempt delivered and released.

    Attributes:
        settings: what was run.
        planned: by step, the record ids that the sampler chose.
        delivered: by step and rank, the canaries whose pictures reached the model with a weight,
            read off the pixels; of one rank alone where this process is one of several.
        responses: the release in each canary's direction, in noise standard deviations.
        residuals: by step, the release less what the delivered canaries should have added, in noise
            standard deviations; float64 [2 N + NUM_SILENT].
        released: by step, B x the released vector, in float64, as it came.
    """

    settings: AuditSettings
    planned: Sequence[npt.NDArray[np.int64]]
    delivered: Sequence[Sequence[npt.NDArray[np.int64]]]
    responses: npt.NDArray[np.float64]
    residuals: Sequence[npt.NDArray[np.float64]]
    released: Sequence[npt.NDArray[np.float64]]


class CanaryModel(nn.Module):
    """Loss of a canary: its norm times the sum of its entries in two weight vectors."""

    def __init__(self, settings: AuditSettings) -> None:
        super().__init__()
        num = settings.num_canaries
        directions = np.zeros(num, np.int64) if settings.is_hostile else np.arange(num)
        self.register_buffer("scale_N", torch.from_numpy(settings.norms() / math.sqrt(2)).float())
        self.register_buffer("direction_N", torch.from_numpy(directions))
        self.blocks = nn.ModuleList([nn.Linear(num, 1, bias=False) for _ in range(2)])
        self.silent = nn.Linear(_SILENT_SIDE, _SILENT_SIDE, bias=False)

    def forward(self, images_M3HW: Tensor, mask_uniforms: Tensor) -> Tensor:
        """Loss of each view of each picture, [M V]."""
        scale_N, direction_N = self.get_buffer("scale_N"), self.get_buffer("direction_N")
        numbers_M = numbers_of(images_M3HW, threshold=0.0).clamp(max=len(scale_N) - 1)
        rows_MN = images_M3HW.new_zeros(len(images_M3HW), len(scale_N))
        rows_MN.scatter_(1, direction_N[numbers_M, None], scale_N[numbers_M, None])
        seen_M = (self.blocks[0](rows_MN) + self.blocks[1](rows_MN)).squeeze(1)
        return seen_M + self.silent(rows_MN.new_zeros(len(rows_MN), _SILENT_SIDE)).sum(1)


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
            "views_per_image": settings.views_per_image,
            "privacy": {
                "noise_multiplier": mechanism.noise_multiplier,
                "max_grad_norm": mechanism.max_grad_norm,
                "clipping": settings.clipping,
                "clipping_style": settings.clipping_style,
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
    settings: AuditSettings,
    *,
    num_steps: int | None = None,
    rank: int | None = None,
    store_root: str | None = None,
) -> Observation:
    """Runs `num_steps` (default: all) steps of an attempt and keeps what came out.

    Args:
        rank: this process's, where it is one of several; None takes every rank's share here.
        store_root: the canaries' pictures, where another process has made them.

    Raises:
        whatever the step raises: an audit takes that as a failed check.
    """
    mechanism, num = settings.mechanism, settings.num_canaries
    key = settings.key()
    plan = mechanism.plan(key.sampling_key(), num_records=num)
    gradients = PrivateGradients(
        cast(MaskedAutoencoder, CanaryModel(settings)),
        phase_settings(settings),
        plan,
        key,
        PrivateLog(None, ""),
    )
    config = StreamConfig(
        plan=plan,
        store_root=store_root or canary_store(num),
        augmentation_key=key.augmentation_key(),
        world_size=settings.world_size,
        microbatch_size=settings.microbatch_size,
        microbatches_per_unit=1,
        image_size=SIDE,
        num_steps=mechanism.num_steps if num_steps is None else num_steps,
        is_private=True,
        augment=False,
        views_per_image=settings.views_per_image,
    )
    ranks = range(settings.world_size) if rank is None else [rank]
    streams = [
        cast(Generator[Unit, None, None], thread_pool_units(config, each, num_threads=1))
        for each in ranks
    ]
    expected = settings.contributions() / math.sqrt(2)
    planned, delivered, responses, residuals, released = [], [], [], [], []
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the matrices are small: more threads only wait for each other
    try:
        for step in config.steps:
            gradients.begin_step(step)
            shares = [_accumulate(settings, gradients, stream, step) for stream in streams]
            flat = gradients.finish_step(step).flat.double().numpy()
            flat = flat * mechanism.expected_batch_size
            relative = flat / mechanism.noise_std
            responses.append((relative[:num] + relative[num : 2 * num]) / math.sqrt(2))
            added = np.bincount(np.concatenate(shares), minlength=num)[:num] * expected
            residual = relative.copy()
            residual[:num] -= added
            residual[num : 2 * num] -= added
            planned.append(plan.record_ids(step))
            delivered.append(shares)
            residuals.append(residual)
            released.append(flat)
    finally:
        for stream in streams:
            stream.close()
        gradients.close()
        torch.set_num_threads(num_threads)
    return Observation(
        settings=settings,
        planned=planned,
        delivered=delivered,
        responses=np.array(responses),
        residuals=residuals,
        released=released,
    )


def _accumulate(
    settings: AuditSettings, gradients: PrivateGradients, stream: Iterator[Unit], step: int
) -> npt.NDArray[np.int64]:
    """Feeds one rank's units of a step to the model, as a phase does; returns who they showed."""
    shown, position, num_units = [], 0, 1
    while position < num_units:
        unit = next(stream, None)
        if unit is None or (unit.step, unit.unit) != (step, position):
            raise DeliveryError(f"step {step}: the stream ended or brought another step's images")
        position, num_units = position + 1, unit.num_units
        images, weights = torch.from_numpy(unit.images), torch.from_numpy(unit.weights)
        numbers = numbers_of(images[:: settings.views_per_image], threshold=127.5)
        shown.append(numbers[weights > 0].numpy())
        if settings.is_included is not None:
            is_there = torch.from_numpy(settings.is_included)
            weights = weights * is_there[numbers.clamp(max=len(is_there) - 1)]
        gradients.accumulate(normalise_images(images), torch.zeros(len(images), 1), weights)
    return np.concatenate(shown)
