"""Ways to break the real step, each by changing the code that training runs.

A fault is a function that patches; what it plants is what a person could write by mistake.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from pipeline.data import stream
from pipeline.dpsgd import clipping, engine, release
from pipeline.dpsgd.engine import ClippedGradientSum
from pipeline.privacy.keys import AttemptKey
from pipeline.privacy.noise import KeyedNoise
from pipeline.privacy.sampling import PoissonPlan
from pipeline.training import gradients, phase

Patch = pytest.MonkeyPatch
Fault = Callable[[Patch], None]
Gaussian = Callable[[KeyedNoise, int, int, int], np.ndarray]

_gaussian: Gaussian = KeyedNoise.gaussian
_record_ids = PoissonPlan.record_ids
_accumulate = ClippedGradientSum.accumulate
WORLD = 2


def noise_as(change: Callable[[Gaussian, KeyedNoise, int, int, int], np.ndarray]) -> Fault:
    def plant(patch: Patch) -> None:
        def gaussian(self: KeyedNoise, step: int, start: int, stop: int) -> np.ndarray:
            return change(_gaussian, self, step, start, stop)

        patch.setattr(KeyedNoise, "gaussian", gaussian)

    return plant


def scaled(factor: float) -> Fault:
    return noise_as(lambda draw, self, step, start, stop: factor * draw(self, step, start, stop))


def repeated_every(length: Callable[[int], int]) -> Fault:
    """Coordinate c gets the noise of c modulo a length: what ranks with one generator do."""

    def change(draw: Gaussian, self: KeyedNoise, step: int, start: int, stop: int) -> np.ndarray:
        period = length(stop)
        return draw(self, step, 0, period)[np.arange(start, stop) % period]

    return noise_as(change)


def bf16_noise(draw: Gaussian, self: KeyedNoise, step: int, start: int, stop: int) -> np.ndarray:
    values = torch.from_numpy(draw(self, step, start, stop))
    return values.bfloat16().double().numpy()


def uniform_noise(draw: Gaussian, self: KeyedNoise, step: int, start: int, stop: int) -> np.ndarray:
    from scipy.stats import norm

    return (norm.cdf(draw(self, step, start, stop)) - 0.5) * math.sqrt(12)


def factors_as(change: Callable[[torch.Tensor, float], torch.Tensor]) -> Fault:
    def plant(patch: Patch) -> None:
        def factors(self: Any, norms_M: torch.Tensor) -> torch.Tensor:
            return change(norms_M, self.max_grad_norm)

        patch.setattr(clipping.FlatClipping, "factors", factors)

    return plant


def microbatch_clip(norms_M: torch.Tensor, bound: float) -> torch.Tensor:
    """The microbatch's sum is clipped, not each image (canaries are orthogonal)."""
    total = norms_M.nan_to_num().square().sum().sqrt()
    return torch.full_like(norms_M, min(1.0, bound / float(total)) if total > 0 else 1.0)


def norms_as(factor: float) -> Fault:
    """The norm that is compared with the bound is `factor` of the true one."""

    def plant(patch: Patch) -> None:
        original = engine._whole_norms
        patch.setattr(engine, "_whole_norms", lambda *found: factor * original(*found))

    return plant


def blocks_without_sqrt(patch: Patch) -> None:
    """Each of K blocks is clipped to max_grad_norm."""
    patch.setattr(clipping, "_share", lambda max_grad_norm, num_blocks: max_grad_norm)


def factors_of_another_block(patch: Patch) -> None:
    """A block gets the factor of the one before it."""
    of = engine.ClippedGradientSum.__init__

    def made(self: ClippedGradientSum, *given: Any, **options: Any) -> None:
        of(self, *given, **options)
        num_blocks = len(self._blocks)
        self._block_of = {place: (k - 1) % num_blocks for place, k in self._block_of.items()}

    patch.setattr(ClippedGradientSum, "__init__", made)


def views_clipped_one_by_one(patch: Patch) -> None:
    """Each view is an image of its own for the clip."""

    def accumulate(self: Any, images: Any, mask_uniforms: Any, weights: torch.Tensor) -> None:
        num_views = self._settings.phase.views_per_image
        self._sums.accumulate(
            lambda: self._model(images, mask_uniforms), weights.repeat_interleave(num_views)
        )

    patch.setattr(gradients.PrivateGradients, "accumulate", accumulate)


def nan_through_the_clip(patch: Patch) -> None:
    def accumulate(self: ClippedGradientSum, losses: Any, weights: Any = None) -> Any:
        facts = _accumulate(self, losses, weights)
        if not bool(torch.isfinite(facts.losses_M[weights > 0]).all()):
            self.flat_sum += math.nan
        return facts

    patch.setattr(ClippedGradientSum, "accumulate", accumulate)


def sampled_as(change: Callable[[PoissonPlan, int], np.ndarray]) -> Fault:
    def plant(patch: Patch) -> None:
        patch.setattr(PoissonPlan, "record_ids", change)

    return plant


def rate_times(factor: float) -> Fault:
    def change(self: PoissonPlan, step: int) -> np.ndarray:
        q = self.sampling_probability * factor
        wider = PoissonPlan(key=self.key, num_records=self.num_records, sampling_probability=q)
        return _record_ids(wider, step)

    return sampled_as(change)


def batch_size(plan: PoissonPlan) -> int:
    return round(plan.num_records * plan.sampling_probability)


def shuffled(self: PoissonPlan, step: int) -> np.ndarray:
    """Fixed batches of a shuffled epoch."""
    size = batch_size(self)
    epoch, position = divmod(step, self.num_records // size)
    order = np.random.default_rng([self.key[0], epoch]).permutation(self.num_records)
    return np.sort(order[position * size : (position + 1) * size])


def fixed_size(self: PoissonPlan, step: int) -> np.ndarray:
    random = np.random.default_rng([self.key[0], step])
    return np.sort(random.permutation(self.num_records)[: batch_size(self)])


def truncated(self: PoissonPlan, step: int) -> np.ndarray:
    ids = _record_ids(self, step)
    return np.sort(np.random.default_rng(step).permutation(ids)[: batch_size(self)])


def shared_sampler_seed(self: PoissonPlan, step: int) -> np.ndarray:
    """Each of two ranks samples its own half of the records, with the same coins."""
    half = PoissonPlan(
        key=self.key,
        num_records=self.num_records // WORLD,
        sampling_probability=self.sampling_probability,
    )
    ids = _record_ids(half, step)
    return np.concatenate([ids, ids + half.num_records])


def same_sample_each_step(self: PoissonPlan, step: int) -> np.ndarray:
    return _record_ids(self, 0)


def every_record_twice(self: PoissonPlan, step: int) -> np.ndarray:
    """A retried read is delivered again."""
    return np.repeat(_record_ids(self, step), 2)


def realised_batch_division(patch: Patch) -> None:
    counts: dict[int, int] = {}

    def remember(self: PoissonPlan, step: int) -> np.ndarray:
        ids = _record_ids(self, step)
        counts[step] = len(ids)
        return ids

    release = gradients.release_gradient

    def divided(flat_sum: Any, *, step: int, divisor: float, **rest: Any) -> Any:
        found = release(flat_sum, step=step, divisor=divisor, **rest)
        found.flat.mul_(divisor / max(counts[step], 1))
        return found

    patch.setattr(PoissonPlan, "record_ids", remember)
    patch.setattr(gradients, "release_gradient", divided)


def shares_as(change: Callable[[np.ndarray], np.ndarray]) -> Fault:
    """What a rank reads of the records that it should."""

    def plant(patch: Patch) -> None:
        share = stream.rank_slice
        patch.setattr(
            stream, "rank_slice", lambda ids, rank, world: change(share(ids, rank, world))
        )

    return plant


def both_ranks_read_all(patch: Patch) -> None:
    """Every rank takes the whole sample instead of its slice of it."""
    patch.setattr(stream, "rank_slice", lambda ids, rank, world: ids)


def all_ranks_are_the_first(patch: Patch) -> None:
    """Every rank takes itself for rank 0."""
    share = stream.rank_slice
    patch.setattr(stream, "rank_slice", lambda ids, rank, world: share(ids, 0, world))


def pictures_as(change: Callable[[stream.Unit], None]) -> Fault:
    """What is done to the pictures of a unit once they are read."""

    def plant(patch: Patch) -> None:
        fill = stream._UnitBuilder._fill

        def filled(self: stream._UnitBuilder, reader: Any, chunk: slice, pixels: Any) -> None:
            fill(self, reader, chunk, pixels)
            change(self.unit)

        patch.setattr(stream._UnitBuilder, "_fill", filled)

    return plant


def neighbour_stands_in(unit: stream.Unit) -> None:
    """A record that does not decode (here every twentieth) is replaced by the one before it."""
    for row in np.flatnonzero(unit.record_ids % 20 == 7):
        unit.images[row] = unit.images[row - 1] if row else 0


def other_grid(patch: Patch) -> None:
    """Sum + noise rounded only to what fp32 has: the low bits tell what the noise was added to."""
    promised = release.noise_grid
    patch.setattr(release, "noise_grid", lambda noise_std: promised(noise_std) / 1024)


def same_key_again(patch: Patch) -> None:
    """Resume with the key of the attempt before: its sample and its noise come again."""
    key = AttemptKey.from_bytes(b"k" * 32)
    patch.setattr(AttemptKey, "from_os_entropy", classmethod(lambda cls: key))


def noise_once_only(
    draw: Gaussian, self: KeyedNoise, step: int, start: int, stop: int
) -> np.ndarray:
    return draw(self, step, start, stop) if step == 0 else np.zeros(stop - start)


def one_step_is_not_charged(patch: Patch) -> None:
    charge = phase._OpenPhase._charge
    patch.setattr(
        phase._OpenPhase, "_charge", lambda self, num_steps: charge(self, max(1, num_steps - 1))
    )


def one_step_more(patch: Patch) -> None:
    """Steps 0 to T, T included."""
    config, run_window = phase.StreamConfig, phase._OpenPhase.run_window

    def longer(**fields: Any) -> stream.StreamConfig:
        return config(**fields | {"num_steps": fields["num_steps"] + 1})

    def run_window_and_more(self: phase._OpenPhase, on_window: Any) -> None:
        run_window(self, on_window)
        if self.state.finished is not None:
            self._run_step(self.state.step)

    patch.setattr(phase, "StreamConfig", longer)
    patch.setattr(phase._OpenPhase, "run_window", run_window_and_more)


FAULTS: dict[str, Fault] = {
    "no noise": scaled(0.0),
    "noise / W": scaled(1 / WORLD),
    "noise / sqrt(W)": scaled(1 / math.sqrt(WORLD)),
    "noise x 0.9": scaled(0.9),
    "noise x 0.99": scaled(0.99),
    "noise in the first step only": noise_as(noise_once_only),
    "the same noise in every step": noise_as(
        lambda draw, self, step, start, stop: draw(self, 0, start, stop)
    ),
    "noise tiled over two slices": repeated_every(lambda size: -(-size // WORLD)),
    "noise repeats after a chunk": repeated_every(lambda size: min(size, 65_536)),
    "bf16 noise": noise_as(bf16_noise),
    "noise off its grid": other_grid,
    "uniform noise of the same width": noise_as(uniform_noise),
    "no clip": factors_as(lambda norms_M, bound: torch.ones_like(norms_M)),
    "microbatch clip": factors_as(microbatch_clip),
    "per-layer clip without sqrt": norms_as(1 / math.sqrt(2)),
    "norms 1 % too small": norms_as(0.99),
    "NaN through the clip": nan_through_the_clip,
    "rate x 2": rate_times(2.0),
    "rate x 1.1": rate_times(1.1),
    "shuffled batches": sampled_as(shuffled),
    "fixed batch size": sampled_as(fixed_size),
    "batches truncated at B": sampled_as(truncated),
    "the same sample in every step": sampled_as(same_sample_each_step),
    "shared sampler seed": sampled_as(shared_sampler_seed),
    "records delivered twice": sampled_as(every_record_twice),
    "every rank reads the whole sample": both_ranks_read_all,
    "every rank reads the first one's share": all_ranks_are_the_first,
    "incomplete microbatches dropped": shares_as(lambda ids: ids[: len(ids) // 8 * 8]),
    "one record of 200 is never read": shares_as(lambda ids: ids[ids % 200 != 7]),
    "a neighbour for what does not decode": pictures_as(neighbour_stands_in),
    "division by the realised batch": realised_batch_division,
    "the key again after a resume": same_key_again,
    "a step that is not charged": one_step_is_not_charged,
    "a step more than promised": one_step_more,
}
