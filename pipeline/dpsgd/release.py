"""From the private sum to what may be seen: one reduction, one noise draw, one division.

Every coordinate of the flat vector gets exactly one Gaussian draw per logical step, addressed by
its absolute place, so that the draw does not depend on the number of ranks or microbatches. Sum and
noise are added in float64 and rounded once to a power-of-two grid, which hides the low bits of both
(Mironov, CCS 2012; arXiv 2112.05307); then comes the division by a public constant.

    flat sums of all ranks --reduce-scatter--> slice of each rank --+ noise, grid, / B--> all-gather

The sums are reduced in buckets of a fixed size, so that no second flat vector is needed. Where the
optimizer's state is sharded too, each rank keeps the released slice and nothing is gathered here.
"""

from __future__ import annotations

import math
import weakref
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pipeline.dpsgd.layout import ParameterLayout, Trainable, trainable_parameters
from pipeline.dpsgd.noise import NoiseAhead, NoiseSource, noise_blocks, noise_grid

__all__ = [
    "NoiseAhead",
    "NoiseSource",
    "PublicGradient",
    "ReleasedGradient",
    "mix",
    "noise_grid",
    "public_gradient",
    "rank_slice",
    "release_gradient",
]

REDUCE_BUCKET = 2**24
"""Coordinates of all ranks together that one collective call reduces: 64 MiB of fp32."""

_MADE_HERE = object()


# -- what comes out --------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, eq=False)
class ReleasedGradient:
    """A gradient that carries its noise: the only kind a private phase's optimizer accepts.

    Made by `release_gradient` and `mix` alone; the constructor refuses everybody else.

    Args:
        flat: one number per coordinate, fp32: of the whole layout, or of a rank's slice of it.
        step: the logical step.
        noise_std_per_coordinate: standard deviation of the noise in `flat`.
        layout: which coordinate is which parameter.
        start: the coordinate of the first number in `flat`.
    """

    flat: Tensor
    step: int
    noise_std_per_coordinate: float
    layout: ParameterLayout
    start: int = 0
    _made_by: object = field(repr=False, default=None)

    def __post_init__(self) -> None:
        if self._made_by is not _MADE_HERE:
            raise ValueError(
                "a ReleasedGradient comes from release_gradient(...) or mix(...) only; "
                "no other gradient of private images may reach the optimizer"
            )
        _check_slice(self.flat, self.start, self.layout)

    def assign(self, model: Trainable) -> None:
        """Set `.grad` of the model's trainable parameters, for any torch optimizer."""
        _assign(self.flat, self.layout, model)


@dataclass(frozen=True, kw_only=True, eq=False)
class PublicGradient:
    """A gradient of public images, without noise.

    Args:
        flat: one number per coordinate, fp32: of the whole layout, or of a rank's slice of it.
        layout: which coordinate is which parameter.
        is_public: True, read from the manifest of the images.
        start: the coordinate of the first number in `flat`.
    """

    flat: Tensor
    layout: ParameterLayout
    is_public: bool
    start: int = 0

    def __post_init__(self) -> None:
        if self.is_public is not True:
            raise ValueError(
                "a PublicGradient needs is_public=True, from a manifest marked public; "
                "release the gradient of private images with release_gradient(...)"
            )
        _check_slice(self.flat, self.start, self.layout)

    def assign(self, model: Trainable) -> None:
        """Set `.grad` of the model's trainable parameters, for any torch optimizer."""
        _assign(self.flat, self.layout, model)


def _check_slice(flat: Tensor, start: int, layout: ParameterLayout) -> None:
    """Raise unless `flat` is a vector of coordinates from `start` on that the layout has."""
    if flat.dim() != 1 or not 0 <= start <= start + len(flat) <= layout.num_coordinates:
        raise ValueError(
            f"a flat vector of this layout has shape ({layout.num_coordinates},), or is a slice of "
            f"it; not {tuple(flat.shape)} from coordinate {start} on"
        )


def _assign(flat: Tensor, layout: ParameterLayout, model: Trainable) -> None:
    if len(flat) < layout.num_coordinates:
        raise ValueError(
            f"this gradient is a slice, {len(flat)} of {layout.num_coordinates} coordinates: give "
            "it to an optimizer whose state is sharded in the same way"
        )
    parameters = trainable_parameters(model)
    shapes = tuple(parameter.shape for parameter in parameters.values())
    if tuple(parameters) != layout.names or shapes != layout.shapes:
        raise ValueError(
            f"the model's trainable parameters ({len(parameters)}) are not those of the gradient "
            f"({len(layout.names)}), in the same order and shape"
        )
    for view, parameter in zip(layout.views(flat).values(), parameters.values(), strict=True):
        parameter.grad = view.to(parameter.device, parameter.dtype)


def mix(alpha: float, public: PublicGradient, released: ReleasedGradient) -> ReleasedGradient:
    """alpha x public + (1 - alpha) x released: the only way to combine the two.

    Source: arXiv 2402.18752, section 4.

    Args:
        alpha: share of the public gradient, in [0, 1].
        public: gradient of public images.
        released: gradient of private images, with its noise.

    Raises:
        ValueError: alpha outside [0, 1], different layouts or different slices.
    """
    if not 0.0 <= alpha <= 1.0:
        raise ValueError(f"alpha must lie in [0, 1], not {alpha}")
    if public.layout != released.layout:
        raise ValueError("the public and the released gradient have different layouts")
    if (public.start, len(public.flat)) != (released.start, len(released.flat)):
        raise ValueError("the public and the released gradient are different slices of the layout")
    return replace(
        released,
        flat=alpha * public.flat + (1.0 - alpha) * released.flat,
        noise_std_per_coordinate=(1.0 - alpha) * released.noise_std_per_coordinate,
    )


# -- the ranks -------------------------------------------------------------------------------------


def _rank_and_world(group: dist.ProcessGroup | None) -> tuple[int, int]:
    if not (dist.is_available() and dist.is_initialized()):
        return 0, 1
    return dist.get_rank(group), dist.get_world_size(group)


def rank_slice(num_coordinates: int, group: dist.ProcessGroup | None = None) -> tuple[int, int]:
    """Which coordinates this rank adds noise to: (start, stop), padding left out."""
    rank, world_size = _rank_and_world(group)
    length = -(-num_coordinates // world_size)
    return min(rank * length, num_coordinates), min((rank + 1) * length, num_coordinates)


def _reduce_scatter(flat: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """The sum over ranks of this rank's slice, zeros behind it up to the slices' common length.

    Bucket b holds the coordinates [b, b + width) of every rank's slice, one rank after the other.
    """
    _, world_size = _rank_and_world(group)
    if world_size == 1:
        return flat
    # Named reduce_scatter_tensor and all_gather_into_tensor before torch 2.14.
    reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    length = -(-len(flat) // world_size)
    width = max(1, min(length, REDUCE_BUCKET // world_size))
    part = flat.new_empty(length)
    bucket = flat.new_empty(world_size * width)
    for begin in range(0, length, width):
        end = min(begin + width, length)
        filled = bucket[: world_size * (end - begin)].view(world_size, end - begin)
        for rank, row in enumerate(filled):
            own = flat[rank * length + begin : rank * length + end]
            row[: len(own)] = own
            row[len(own) :] = 0  # the last slices are padded
        reduce_scatter(part[begin:end], filled.view(-1), group=group)
    return part


def _all_gather(part: Tensor, num_coordinates: int, group: dist.ProcessGroup | None) -> Tensor:
    _, world_size = _rank_and_world(group)
    if world_size == 1:
        return part
    padded = part.new_empty(len(part) * world_size)
    all_gather_slices(padded, part, group)
    return padded[:num_coordinates]


def all_gather_slices(padded: Tensor, part: Tensor, group: dist.ProcessGroup | None = None) -> None:
    """Fill `padded` with every rank's part, all of the same length, in the order of the ranks."""
    all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    all_gather(padded, part, group=group)


# -- the release -----------------------------------------------------------------------------------


_last_released: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()


def _claim_step(noise_source: NoiseSource, step: int) -> None:
    """Two releases with the same noise would reveal the difference of their sums."""
    if step < 0:
        raise ValueError(f"step must be >= 0, not {step}")
    source = noise_source.source if isinstance(noise_source, NoiseAhead) else noise_source
    last = _last_released.get(source)
    if last is not None and step <= last:
        raise ValueError(
            f"the noise of step {step} was already used (last released step: {last}); a step is "
            "released once, and a new attempt needs a noise source with a new key"
        )
    _last_released[source] = step


def _check_divisor(divisor: float) -> None:
    if not (math.isfinite(divisor) and divisor > 0):
        raise ValueError(f"divisor must be > 0 and finite, not {divisor}")


def release_gradient(
    flat_sum: Tensor,
    *,
    step: int,
    noise_std: float,
    divisor: float,
    noise_source: NoiseSource,
    layout: ParameterLayout,
    group: dist.ProcessGroup | None = None,
    gathers: bool = True,
) -> ReleasedGradient:
    """(sum over ranks of flat_sum + noise_std z) / divisor, with one draw z per coordinate.

    Called by every rank once per logical step, also when it had no image: noise is always added.

    Args:
        flat_sum: this rank's sum of clipped gradients, [num_coordinates]; left unchanged.
        step: the logical step; each is released once per noise source, in rising order.
        noise_std: noise_multiplier x the clipper's sensitivity, > 0.
        divisor: the expected batch size B: a public constant, never the realised count.
        noise_source: the keyed Gaussian of this attempt, the same on every rank.
        layout: the engine's layout.
        group: the ranks that share the sum: by default all, or one without torch.distributed.
        gathers: whether every rank gets the whole gradient, or its own `rank_slice` alone.

    Raises:
        ValueError: a bad argument, a sum that is not finite, or a step that was released before.

    Guarantees:
        1. One draw per coordinate and step, the same whatever the number of ranks; none for padding
           (tests/guarantees/test_one_noise_draw.py), and whatever the size of the buckets
           (tests/dpsgd/test_reduction.py).
        2. Sum and noise are added in float64 and rounded once to `noise_grid(noise_std)`; a number
           beyond 2^24 grid points is rounded to fp32, which is a coarser grid
           (tests/guarantees/test_noise_grid.py).
        3. Divided by the constant and nothing else (tests/dpsgd/test_release.py).
    """
    grid = noise_grid(noise_std)
    _check_divisor(divisor)
    layout.check(flat_sum)
    if not all(math.isfinite(edge) for edge in torch.stack(torch.aminmax(flat_sum)).tolist()):
        raise ValueError(
            "flat_sum is not finite, so it does not come from ClippedGradientSum; "
            "nothing can be released of it"
        )
    _claim_step(noise_source, step)
    start, stop = rank_slice(layout.num_coordinates, group)
    sums = _reduce_scatter(flat_sum.detach(), group)
    released = torch.zeros_like(sums, dtype=torch.float32)
    for block_start, block_stop in noise_blocks(start, stop):
        noise = torch.from_numpy(noise_source.gaussian(step, block_start, block_stop))
        if noise.dtype != torch.float64 or noise.shape != (block_stop - block_start,):
            raise ValueError(
                f"noise_source gave {tuple(noise.shape)} of {noise.dtype}, not "
                f"({block_stop - block_start},) of float64"
            )
        block = slice(block_start - start, block_stop - start)
        noisy = noise.to(sums.device).mul_(noise_std).add_(sums[block])
        released[block] = noisy.div_(grid).round_().mul_(grid)
    released.div_(divisor)
    if gathers:
        flat, start = _all_gather(released, layout.num_coordinates, group), 0
    else:
        flat = released[: stop - start]
    return ReleasedGradient(
        flat=flat,
        step=step,
        noise_std_per_coordinate=noise_std / divisor,
        layout=layout,
        start=start,
        _made_by=_MADE_HERE,
    )


def public_gradient(
    flat_sum: Tensor,
    *,
    divisor: float,
    layout: ParameterLayout,
    is_public: bool,
    group: dist.ProcessGroup | None = None,
    gathers: bool = True,
) -> PublicGradient:
    """(sum over ranks of flat_sum) / divisor, for images whose manifest is marked public.

    Args:
        flat_sum: this rank's sum of gradients, [num_coordinates]; left unchanged.
        divisor: the number of images of the logical batch.
        layout: which coordinate is which parameter.
        is_public: whether the manifest of the images is marked public.
        group, gathers: as in `release_gradient`.
    """
    _check_divisor(divisor)
    start, flat = 0, flat_sum.detach()
    if is_public:
        layout.check(flat)
        start, stop = rank_slice(layout.num_coordinates, group)
        flat = _reduce_scatter(flat, group)
        if gathers:
            start, flat = 0, _all_gather(flat, layout.num_coordinates, group)
        else:
            flat = flat[: stop - start]
    return PublicGradient(
        flat=flat.div(divisor).float(), layout=layout, is_public=is_public, start=start
    )
