"""Pitfalls 16 and 32: one draw per coordinate and step, whatever the microbatches and ranks."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from dpsgd_seeded_noise import SeededNoise
from gloo import run_ranks

from pipeline.dpsgd import (
    ClippedGradientSum,
    FlatClipping,
    ParameterLayout,
    rank_slice,
    release_gradient,
)

NUM_IMAGES, NOISE_STD, BATCH = 8, 0.7, 10.0
STEPS = 2


def sums(rank: int, world_size: int, microbatch: int) -> list[torch.Tensor]:
    """What a rank has summed in each of two logical steps of 8 images."""
    from dpsgd_small_mae import batch, losses_of, small_mae

    model = small_mae(torch.float32)
    engine = ClippedGradientSum(model, FlatClipping(0.05))
    found = []
    for step in range(STEPS):
        inputs = batch(NUM_IMAGES, torch.float32, seed=step)
        mine = list(range(rank, NUM_IMAGES, world_size))
        engine.zero_()
        for start in range(0, len(mine), microbatch):
            rows = mine[start : start + microbatch]
            engine.accumulate(losses_of(model, tuple(each[rows] for each in inputs)))
        found.append(engine.flat_sum.clone())
    return found


def released(flat_sums: list[torch.Tensor], noise: SeededNoise) -> list[np.ndarray]:
    """What the optimizer sees in each step."""
    length = len(flat_sums[0])
    layout = ParameterLayout(
        names=("all",), shapes=(torch.Size([length]),), offsets=(0,), num_coordinates=length
    )
    return [
        release_gradient(
            flat_sum,
            step=step,
            noise_std=NOISE_STD,
            divisor=BATCH,
            noise_source=noise,
            layout=layout,
        ).flat.numpy()
        for step, flat_sum in enumerate(flat_sums)
    ]


@pytest.mark.parametrize("microbatch", [1, 3, 8])
def test_the_noise_has_one_std_in_every_step(microbatch: int) -> None:
    """std = noise_std / B within 1 %, however many microbatches there were."""
    noise = SeededNoise()
    summed = sums(0, 1, microbatch)
    with_noise = released(summed, noise)
    without = released(summed, SeededNoise(scale=0.0))
    length = len(with_noise[0])
    for noisy, clean in zip(with_noise, without, strict=True):
        # 20,619 draws determine a standard deviation to 0.5 %; these are fixed ones
        assert math.isclose(float((noisy - clean).std()), NOISE_STD / BATCH, rel_tol=0.01)
    assert not np.array_equal(with_noise[0], with_noise[1])
    drawn = [(step, start, stop) for step, start, stop in noise.drawn if start < stop]
    assert drawn == [(0, 0, length), (1, 0, length)]  # every coordinate once a step


def test_microbatches_give_the_same_release() -> None:
    whole, *others = (released(sums(0, 1, size), SeededNoise()) for size in (8, 1, 3))
    for other in others:
        np.testing.assert_allclose(other, whole, rtol=1e-4, atol=1e-6)


def test_a_step_is_released_once() -> None:
    """The same noise on two sums would reveal their difference."""
    noise = SeededNoise()
    released([torch.zeros(5), torch.zeros(5)], noise)
    with pytest.raises(ValueError, match="already used"):
        released([torch.ones(5)], noise)


def rank_main(rank: int, world_size: int, folder: Path) -> None:
    """One rank of the test below."""
    flat_sums = list(torch.from_numpy(np.load(folder / f"sums-{rank}.npy")))
    noise = SeededNoise()
    summed = released(flat_sums, noise)
    noise_only = released([torch.zeros_like(each) for each in flat_sums], SeededNoise())
    start, stop = rank_slice(len(flat_sums[0]))
    assert noise.drawn == [(step, start, stop) for step in range(STEPS) if start < stop]
    one = released([torch.ones(1)], tiny := SeededNoise())  # every other rank holds padding alone
    assert abs(one[0][0] * BATCH - world_size) < 5 * NOISE_STD
    assert bool(tiny.drawn) == (rank == 0)
    np.savez(folder / f"{rank}.npz", summed=summed, noise_only=noise_only, slice=(start, stop))


def run_world(flat_sums: list[list[torch.Tensor]], folder: Path) -> list[dict[str, np.ndarray]]:
    """What each rank released, given what each has summed."""
    world_size = len(flat_sums)
    for rank, steps in enumerate(flat_sums):
        np.save(folder / f"sums-{rank}.npy", torch.stack(steps).numpy())
    run_ranks(world_size, rank_main, folder)
    return [dict(np.load(folder / f"{rank}.npz")) for rank in range(world_size)]


@pytest.mark.parametrize("world_size", [2, 4])
def test_ranks_draw_the_noise_of_one_process(world_size: int, tmp_path: Path) -> None:
    """Bit-identical noise, equal on every rank, each coordinate once, none for padding."""
    whole = sums(0, 1, 8)
    alone = released(whole, SeededNoise())
    noise_alone = released([torch.zeros_like(each) for each in whole], SeededNoise())
    length = len(whole[0])
    assert length % 2 == 1  # so that the last slice is padded
    ranks = run_world([sums(rank, world_size, 3) for rank in range(world_size)], tmp_path)
    edges = [rank["slice"].tolist() for rank in ranks]
    assert edges[0][0] == 0 and edges[-1][1] == length
    assert all(left[1] == right[0] for left, right in itertools.pairwise(edges))
    for rank in ranks:
        np.testing.assert_array_equal(rank["noise_only"], noise_alone)
        np.testing.assert_array_equal(rank["summed"], ranks[0]["summed"])
        np.testing.assert_allclose(rank["summed"], alone, rtol=1e-4, atol=1e-6)
