"""Pitfalls 23 and 35: a record that does not decode keeps its slot with weight 0; N stays.

In prepare it is left out and counted, before N is fixed. Afterwards no number of failures stops a
run, moves a neighbour into the slot or changes what the other records get.
"""

from __future__ import annotations

import numpy as np
import pytest

from pipeline.data.images import encode_jpeg
from pipeline.data.prepare import PrepareConfig, prepare, read_summary
from pipeline.data.shards import ShardStore
from pipeline.data.stream import StreamConfig, Unit, thread_pool_units
from pipeline.privacy.sampling import PoissonPlan, checksum
from pipeline.storage import Location


def jpegs(num: int) -> list[bytes]:
    generator = np.random.default_rng(5)
    return [
        encode_jpeg(generator.integers(0, 256, (20, 20, 3), dtype=np.uint8)) for _ in range(num)
    ]


def units_of(store: ShardStore, views_per_image: int = 1) -> list[Unit]:
    config = StreamConfig(
        plan=PoissonPlan(key=b"u" * 32, num_records=store.num_records, sampling_probability=0.3),
        store_root=str(store.root),
        augmentation_key=b"a" * 32,
        world_size=1,
        microbatch_size=8,
        microbatches_per_unit=1,
        image_size=16,
        num_steps=8,
        is_private=True,
        views_per_image=views_per_image,
    )
    units = list(thread_pool_units(config))
    for step in config.steps:
        ids = config.plan.record_ids(step)
        receipts = np.array([unit.receipt() for unit in units if unit.step == step])
        assert receipts[:, 0].sum() == len(ids), "the slot of a failed record counts"
        assert receipts[:, 1].sum() % 2**62 == checksum(ids)
    return units


@pytest.mark.parametrize("num_views", [1, 3])
def test_slot_is_kept_with_weight_0_and_others_are_untouched(dataset_of, num_views: int) -> None:
    whole = jpegs(40)
    damaged = list(whole)
    for record_id, content in ((3, b"not an image"), (17, whole[17][:200]), (30, b"")):
        damaged[record_id] = content
    good = units_of(dataset_of(whole, name="whole"), num_views)
    bad = units_of(dataset_of(damaged, name="damaged"), num_views)
    num_failed = 0
    for one, other in zip(good, bad, strict=True):
        assert (one.record_ids == other.record_ids).all()
        is_failed = np.isin(one.record_ids, (3, 17, 30))
        num_failed += is_failed.sum()
        assert (other.weights == np.where(is_failed, 0, one.weights)).all()
        is_failed = is_failed.repeat(num_views)
        assert not other.images[is_failed].any()
        assert (other.images[~is_failed] == one.images[~is_failed]).all()
    assert num_failed > 3


def test_a_dataset_of_which_nothing_decodes_still_runs(dataset_of) -> None:
    units = units_of(dataset_of([b"no image %d" % i for i in range(20)]))
    assert len(units) >= 8 and all((unit.weights == 0).all() for unit in units)


def test_prepare_leaves_them_out_counts_them_and_fixes_n(tmp_path, image_folder) -> None:
    folder = image_folder("images", 20)
    whole = sorted(folder.rglob("*.png"))
    (folder / "a" / "x1.jpg").write_bytes(jpegs(1)[0][:-300])
    (folder / "a" / "x2.png").write_bytes(whole[0].read_bytes()[:-40])
    (folder / "a" / "x3.gif").write_bytes(b"GIF89a")
    (folder / "a" / "x4.webp").write_bytes(b"RIFF\x10\0\0\0WEBPVP8 ")
    (folder / "a" / "x5.jpg").write_bytes(b"")
    (folder / "a" / "x6.jpg").write_bytes(b"<html>404</html>")
    out = Location(str(tmp_path / "out"))
    manifest = prepare(
        PrepareConfig(name="n", source=f"imagefolder:{folder}", visibility="private", domain="d"),
        out,
    )[""]
    assert manifest.num_records == ShardStore(out).num_records == 20
    left_out = read_summary(out)["left_out"]
    assert sum(left_out.values()) == 6 and left_out["empty"] == 1


@pytest.mark.parametrize("fraction", [0.1, 0.5, 0.9])
def test_no_share_of_failures_stops_a_run(dataset_of, fraction: float) -> None:
    contents = jpegs(30)
    for record_id in range(int(30 * fraction)):
        contents[record_id] = b"damaged"
    units = units_of(dataset_of(contents))
    assert sum(unit.weights.sum() for unit in units) > 0
