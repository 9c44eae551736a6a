"""The reduction of a step: in buckets, to the same bits whatever their size and the ranks."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from gloo import exact_shares, exact_total, run_ranks

from pipeline.dpsgd import ParameterLayout, public_gradient, release, release_gradient
from pipeline.privacy.keys import AttemptKey
from pipeline.privacy.noise import CHUNK, KeyedNoise

LENGTHS = (37, 2 * CHUNK + 4_321)  # the last slice is padded in every world; two chunk borders
BUCKETS = {37: (1, 2, 5, 2**24), LENGTHS[1]: (10_000, CHUNK, 100_001, 2**24)}


class Recorded:
    """The real noise, and what was drawn of it."""

    def __init__(self) -> None:
        self.source = KeyedNoise(noise_key=AttemptKey.seeded(4).noise_key())
        self.drawn: list[tuple[int, int]] = []

    def gaussian(self, step: int, start: int, stop: int) -> np.ndarray:
        self.drawn.append((start, stop))
        return self.source.gaussian(step, start, stop)


def layout_of(length: int) -> ParameterLayout:
    shapes = (torch.Size([length]),)
    return ParameterLayout(names=("all",), shapes=shapes, offsets=(0,), num_coordinates=length)


def released(flat_sum: torch.Tensor, noise: Recorded, *, gathers: bool) -> release.ReleasedGradient:
    return release_gradient(
        flat_sum,
        step=3,
        noise_std=0.7,
        divisor=10.0,
        noise_source=noise,
        layout=layout_of(len(flat_sum)),
        gathers=gathers,
    )


def rank_main(rank: int, world_size: int, folder: Path) -> None:
    """Everything that a rank releases, in one file."""
    found: dict[str, np.ndarray] = {}
    for length in LENGTHS:
        share = exact_shares(exact_total(length, 3), rank, world_size)
        before = share.clone()
        for bucket in BUCKETS[length]:
            release.REDUCE_BUCKET = bucket
            noise = Recorded()
            part = released(share, noise, gathers=False)
            assert not release._reduce_scatter(share, None)[len(part.flat) :].any()  # the padding
            whole = released(share, Recorded(), gathers=True)
            public = public_gradient(
                share, divisor=8.0, layout=layout_of(length), is_public=True, gathers=True
            )
            public_part = public_gradient(
                share, divisor=8.0, layout=layout_of(length), is_public=True, gathers=False
            )
            stop = public_part.start + len(public_part.flat)
            assert torch.equal(public.flat[public_part.start : stop], public_part.flat)
            key = f"{length} {bucket}"
            found[f"whole {key}"] = whole.flat.numpy()
            found[f"public {key}"] = public.flat.numpy()
            found[f"part {key}"] = part.flat.numpy()
            found[f"start {key}"] = np.array(part.start)
            found[f"drawn {key}"] = np.array(noise.drawn).reshape(-1, 2)
        assert torch.equal(share, before)
    np.savez(folder / f"{rank}.npz", **found)


@pytest.mark.parametrize("world_size", [2, 3])
def test_buckets_and_ranks_change_no_bit(world_size: int, tmp_path: Path) -> None:
    """The whole release, its slices, and a public gradient; every coordinate's noise once."""
    run_ranks(world_size, rank_main, tmp_path)
    ranks = [dict(np.load(tmp_path / f"{rank}.npz")) for rank in range(world_size)]
    for length in LENGTHS:
        total = exact_total(length, 3)
        alone = released(total, Recorded(), gathers=True)
        assert (alone.start, len(alone.flat)) == (0, length)
        for bucket in BUCKETS[length]:
            key = f"{length} {bucket}"
            parts = np.concatenate([rank[f"part {key}"] for rank in ranks])
            np.testing.assert_array_equal(parts, alone.flat.numpy())
            for rank in ranks:
                np.testing.assert_array_equal(rank[f"whole {key}"], alone.flat.numpy())
                np.testing.assert_array_equal(rank[f"public {key}"], (total / 8).numpy())
            starts = [int(rank[f"start {key}"]) for rank in ranks]
            lengths = [len(rank[f"part {key}"]) for rank in ranks]
            assert starts == np.cumsum([0, *lengths[:-1]]).tolist()
            drawn = np.zeros(length, int)
            for start, stop in np.concatenate([rank[f"drawn {key}"] for rank in ranks]):
                drawn[start:stop] += 1
            assert (drawn == 1).all()


def test_a_bucket_is_all_that_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """What `_reduce_scatter` asks for: its result and one bucket, not a second flat vector."""
    asked: list[int] = []
    flat = torch.ones(1_000)

    class Counted(torch.Tensor):
        def new_empty(self, size: int) -> torch.Tensor:  # type: ignore[override]
            asked.append(size)
            return torch.empty(size)

    monkeypatch.setattr(release, "_rank_and_world", lambda group: (0, 4))
    monkeypatch.setattr(release, "REDUCE_BUCKET", 40)

    def scatter(part: torch.Tensor, bucket: torch.Tensor, group: object) -> None:
        part.copy_(bucket.view(4, -1).sum(0))

    monkeypatch.setattr(release.dist, "reduce_scatter_single", scatter, raising=False)
    release._reduce_scatter(flat.as_subclass(Counted), None)
    assert asked == [250, 40]
