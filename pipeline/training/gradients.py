"""Where a step's gradient comes from: the private release, or the ordinary public average.

Both have one face, so that the loop in phase.py is the same for public and private phases.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from pipeline.dpsgd.blocks import make_blocks
from pipeline.dpsgd.clipping import make_clipping
from pipeline.dpsgd.compiled import CompiledGradientSum
from pipeline.dpsgd.engine import ClippedGradientSum
from pipeline.dpsgd.layout import ParameterLayout, trainable_parameters
from pipeline.dpsgd.noise import NoiseAhead
from pipeline.dpsgd.release import (
    PublicGradient,
    ReleasedGradient,
    public_gradient,
    rank_slice,
    release_gradient,
)
from pipeline.models.mae import MaskedAutoencoder
from pipeline.privacy.keys import AttemptKey
from pipeline.privacy.mechanism import BrokenPromise
from pipeline.privacy.noise import KeyedNoise
from pipeline.privacy.sampling import PoissonPlan
from pipeline.training.metrics import PrivateLog
from pipeline.training.settings import PhaseSettings


class GradientSource(Protocol):
    """Turns the microbatches of a logical step into one gradient."""

    def begin_step(self, step: int) -> None:
        """Start a logical step."""

    def accumulate(self, images: Tensor, mask_uniforms: Tensor, weights: Tensor) -> None:
        """Add a microbatch of M images in V views each, the views of an image in a row.

        Args:
            images: the views, [M V, 3, H, W].
            mask_uniforms: one row a view, [M V, T].
            weights: one an image, [M]; 0 = padding.
        """

    def finish_step(self, step: int) -> ReleasedGradient | PublicGradient:
        """The step's gradient: the same on every rank, or this rank's slice of it."""

    def public_loss(self) -> float | None:
        """Mean training loss on this rank since it was last asked for; public phases only."""

    def close(self) -> None:
        """Stop background work."""


class PrivateGradients:
    """Clipped sums of private images, released with one noise draw a step.

    Raises:
        ValueError: if sampler, clipping, noise or divisor differ from the mechanism.

    Guarantees:
        1. Sampler and clipper are what the mechanism promises, noise and divisor are taken from it,
           and what the release says it drew is compared with it (test_no_second_truth_in_training).
        2. Losses, norms and factors reach the private log only (test_nothing_private_is_shown).
    """

    def __init__(
        self,
        model: MaskedAutoencoder,
        settings: PhaseSettings,
        plan: PoissonPlan,
        key: AttemptKey,
        log: PrivateLog,
        *,
        gathers: bool = True,
    ) -> None:
        mechanism, privacy = settings.mechanism, settings.phase.privacy
        assert mechanism is not None and privacy is not None
        self._model, self._settings, self._log = model, settings, log
        self._gathers = gathers
        self._mechanism = mechanism
        self._clipping = make_clipping(privacy.clipping, privacy.max_grad_norm, privacy.gamma)
        self._sums = ClippedGradientSum(
            model,
            self._clipping,
            blocks=make_blocks(privacy.clipping_style, model),
            two_backwards=settings.phase.activation_checkpointing,
        )
        self._compiled = None
        if settings.phase.resources.compile:
            self._compiled = CompiledGradientSum(self._sums, self._losses)
        self._divisor = settings.batch_size
        self._noise = NoiseAhead(KeyedNoise(noise_key=key.noise_key()))
        mechanism.require(
            plan=plan,
            sensitivity=self._clipping.sensitivity,
            noise_std=mechanism.noise_std,
            divisor=self._divisor,
        )

    def begin_step(self, step: int) -> None:
        """Zero the sum and start drawing the step's noise in the background."""
        self._sums.zero_()
        self._noise.begin(step, *rank_slice(self._sums.layout.num_coordinates))

    def accumulate(self, images: Tensor, mask_uniforms: Tensor, weights: Tensor) -> None:
        """Add the clipped gradients of a microbatch."""
        if self._compiled is not None:
            facts = self._compiled.accumulate((images, mask_uniforms), weights)
        else:
            facts = self._sums.accumulate(partial(self._losses, images, mask_uniforms), weights)
        self._log.observe(facts.losses_M, facts.block_norms_MK, weights)

    def _losses(self, images: Tensor, mask_uniforms: Tensor) -> Tensor:
        return _losses_of_images(self._model, images, mask_uniforms, self._settings)

    def finish_step(self, step: int) -> ReleasedGradient:
        """Reduce, add the noise once, divide by B."""
        released = release_gradient(
            self._sums.flat_sum,
            step=step,
            noise_std=self._mechanism.noise_std,
            divisor=self._divisor,
            noise_source=self._noise,
            layout=self._sums.layout,
            gathers=self._gathers,
        )
        promised = self._mechanism.noise_std / self._mechanism.expected_batch_size
        if released.noise_std_per_coordinate != promised:
            raise BrokenPromise(
                f"step {step}: the release does not carry the noise that the mechanism promises"
            )
        self._log.end_step(step, self._mechanism.max_grad_norm)
        return released

    def public_loss(self) -> None:
        """A private phase shows no training loss."""

    def close(self) -> None:
        """Stop drawing noise and let go of the noise key."""
        self._noise.close()
        del self._noise


class PublicGradients:
    """The ordinary mean gradient of public images."""

    def __init__(
        self,
        model: MaskedAutoencoder,
        settings: PhaseSettings,
        visibility: str,
        *,
        gathers: bool = True,
    ) -> None:
        self._settings, self._gathers = settings, gathers
        self._is_public = visibility == "public"
        self._forward = torch.compile(model) if settings.phase.resources.compile else model
        self._layout = ParameterLayout.of(model)
        self._parameters = trainable_parameters(model)
        self._loss_sum, self._num_images = 0.0, 0.0

    def begin_step(self, step: int) -> None:
        """Forget the gradients of the step before."""
        for parameter in self._parameters.values():
            parameter.grad = None

    def accumulate(self, images: Tensor, mask_uniforms: Tensor, weights: Tensor) -> None:
        """Add the gradients of a microbatch."""
        losses = _losses_of_images(self._forward, images, mask_uniforms, self._settings)
        total = (losses.float() * weights).sum()
        total.backward()
        self._loss_sum += float(total.detach())
        self._num_images += float(weights.sum())

    def finish_step(self, step: int) -> PublicGradient:
        """Sum over ranks, divide by the batch size."""
        grads = {
            name: torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            for name, parameter in self._parameters.items()
        }
        return public_gradient(
            self._layout.flatten(grads),
            divisor=self._settings.batch_size,
            layout=self._layout,
            is_public=self._is_public,
            gathers=self._gathers,
        )

    def public_loss(self) -> float | None:
        """Mean loss of the window on this rank."""
        if not self._num_images:
            return None
        mean = self._loss_sum / self._num_images
        self._loss_sum, self._num_images = 0.0, 0.0
        return mean

    def close(self) -> None:
        """Nothing runs in the background."""


def _losses_of_images(
    model: Callable[[Tensor, Tensor], Tensor],
    images: Tensor,
    mask_uniforms: Tensor,
    settings: PhaseSettings,
) -> Tensor:
    """The loss of each image, the mean over its V views, [M]; each view's is computed alone."""
    is_bf16 = settings.phase.precision == "bfloat16"
    with torch.autocast(images.device.type, dtype=torch.bfloat16, enabled=is_bf16):
        losses = model(images, mask_uniforms)
    return losses.view(-1, settings.phase.views_per_image).mean(1)
