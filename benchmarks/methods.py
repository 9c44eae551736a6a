"""What step.py compares: each method is one step over the same microbatch of the same model.

Ours and plain are here, with the whole logical steps; the peers are in peers.py.
"""

from __future__ import annotations

import copy
import inspect
import secrets
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from pipeline.dpsgd import (
    ClippedGradientSum,
    FlatClipping,
    NoiseAhead,
    rank_slice,
    release_gradient,
)
from pipeline.models.mae import MaskedAutoencoder
from pipeline.models.sizes import model_size
from pipeline.privacy.noise import KeyedNoise
from pipeline.recipe import Optimizer
from pipeline.training.optimizers import make_optimizer, set_rate

IMAGE_SIZE, PATCH_SIZE = 224, 16
NOISE_MULTIPLIER = 0.5


class Unavailable(Exception):
    """This method cannot run here; the message says why."""


@dataclass(frozen=True, kw_only=True)
class Problem:
    """What every method computes a step of.

    Args:
        model: the masked autoencoder; left unchanged but for `.grad`.
        images: one microbatch, [M, 3, H, W].
        uniforms: its mask, [M, T].
        logical_batch: images of a whole step, a multiple of M.
        per_image_bytes: methods that keep every image's gradient at once take the microbatch in
            chunks whose gradients fit here.
        max_grad_norm: the clip norm.
    """

    model: MaskedAutoencoder
    images: Tensor
    uniforms: Tensor
    logical_batch: int
    per_image_bytes: int = 2**32
    max_grad_norm: float = 1.0

    @property
    def num_microbatches(self) -> int:
        """Of a whole logical step."""
        return self.logical_batch // len(self.images)


@dataclass(frozen=True, kw_only=True)
class Method:
    """A step that can be repeated.

    Args:
        step: does it.
        sums: the clipped sum of the first step, by parameter; of a private method over one
            microbatch.
        note: what a reader of the table must know.
    """

    step: Callable[[], None]
    sums: Callable[[], dict[str, Tensor]] | None = None
    note: str = ""


def make_problem(
    size: str, microbatch: int, device: str, logical_batch: int, per_image_bytes: int = 2**32
) -> Problem:
    """The model of that size and random images; the same in every process."""
    generator = torch.Generator().manual_seed(0)
    model = MaskedAutoencoder(model_size(size), image_size=IMAGE_SIZE, patch_size=PATCH_SIZE)
    model.initialise(generator)
    images = torch.randn(microbatch, 3, IMAGE_SIZE, IMAGE_SIZE, generator=generator)
    uniforms = torch.rand(microbatch, model.num_patches, generator=generator)
    return Problem(
        model=model.to(device),
        images=images.to(device),
        uniforms=uniforms.to(device),
        logical_batch=logical_batch,
        per_image_bytes=per_image_bytes,
    )


def plain(problem: Problem, *, is_bf16: bool = False, is_compiled: bool = False) -> Method:
    """Forward and backward of the mean loss, gradients not kept from the step before."""
    model = torch.compile(problem.model) if is_compiled else problem.model

    def step() -> None:
        problem.model.zero_grad(set_to_none=True)
        with torch.autocast(problem.images.device.type, torch.bfloat16, enabled=is_bf16):
            losses = model(problem.images, problem.uniforms)
        losses.mean().backward()

    return Method(step=step)


def ours(
    problem: Problem, *, mode: str = "auto", is_bf16: bool = False, is_compiled: bool = False
) -> Method:
    """The clipped sum of one microbatch, added to that of the microbatches before."""
    model, clipping = problem.model, FlatClipping(problem.max_grad_norm)
    if not is_compiled:
        clipped = ClippedGradientSum(model, clipping, mode=mode)
    elif "compiled" in inspect.signature(ClippedGradientSum).parameters:
        clipped = ClippedGradientSum(model, clipping, mode=mode, compiled=True)  # type: ignore[call-arg]
    else:
        raise Unavailable("this engine has no compiled form (ClippedGradientSum has no `compiled`)")

    def losses() -> Tensor:
        with torch.autocast(problem.images.device.type, torch.bfloat16, enabled=is_bf16):
            return model(problem.images, problem.uniforms)

    def step() -> None:
        clipped.accumulate(losses)

    return Method(step=step, sums=lambda: clipped.layout.views(clipped.flat_sum))


def whole_plain(problem: Problem, *, is_empty: bool = False) -> Method:
    """A logical step: all microbatches, one update."""
    model, optimizer = _trained_copy(problem)
    num_microbatches = 0 if is_empty else problem.num_microbatches
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)

    def step() -> None:
        if num_microbatches:
            optimizer.zero_grad(set_to_none=True)
        for _ in range(num_microbatches):
            losses = model(problem.images, problem.uniforms)
            (losses.mean() / num_microbatches).backward()
        optimizer.step()

    return Method(step=step, note=_note(num_microbatches, problem))


def whole_ours(problem: Problem, *, is_empty: bool = False) -> Method:
    """A logical step as training does it: clipped sums, keyed noise in float64, one update."""
    model, optimizer = _trained_copy(problem)
    num_microbatches = 0 if is_empty else problem.num_microbatches
    clipping = FlatClipping(problem.max_grad_norm)
    clipped = ClippedGradientSum(model, clipping)
    noise = NoiseAhead(KeyedNoise(noise_key=secrets.token_bytes(32)))
    num_steps = 0

    def step() -> None:
        nonlocal num_steps
        clipped.zero_()
        noise.begin(num_steps, *rank_slice(clipped.layout.num_coordinates))
        for _ in range(num_microbatches):
            clipped.accumulate(lambda: model(problem.images, problem.uniforms))
        released = release_gradient(
            clipped.flat_sum,
            step=num_steps,
            noise_std=NOISE_MULTIPLIER * clipping.sensitivity,
            divisor=problem.logical_batch,
            noise_source=noise,
            layout=clipped.layout,
        )
        released.assign(model)
        optimizer.step()
        num_steps += 1

    return Method(step=step, note=_note(num_microbatches, problem))


def _trained_copy(problem: Problem) -> tuple[MaskedAutoencoder, torch.optim.Optimizer]:
    """A model that the updates may change, with the recipe's AdamW."""
    model = copy.deepcopy(problem.model)
    optimizer = make_optimizer(model.named_parameters(), Optimizer(learning_rate=1e-4))
    set_rate(optimizer, 1e-4)
    return model, optimizer


def _note(num_microbatches: int, problem: Problem) -> str:
    if not num_microbatches:
        return "what a logical step costs besides its microbatches (one process: no reduction)"
    return (
        f"a logical step of {problem.logical_batch} images in {num_microbatches} microbatches and "
        "one process; runs take 4,096 images and more, so noise and update weigh less there"
    )
