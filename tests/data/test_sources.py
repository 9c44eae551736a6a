"""sources.py: the conventions of each kind of source, and its faults."""

from __future__ import annotations

import gzip
import io
import os
import pickle
import tarfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from pipeline.data.images import decode_image
from pipeline.data.sources import RawRecord, open_source
from pipeline.data.synthetic import generate_image


def png(value: int) -> bytes:
    stream = io.BytesIO()
    Image.new("RGB", (9, 9), (value, 0, 0)).save(stream, "PNG")
    return stream.getvalue()


def records_of(uri: str) -> list[RawRecord]:
    """All records, read by a pickled copy, as another process would."""
    source = open_source(uri)
    units = pickle.loads(pickle.dumps(source.list_units()))
    copy = pickle.loads(pickle.dumps(source))
    return [record for unit in units for record in copy.read_unit(unit)]


def write_tar(path: Path, members: list[tuple[str, bytes]]) -> None:
    with tarfile.open(path, "w:gz" if path.suffix == ".gz" else "w") as tar:
        for name, content in members:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))


def write_idx(path: Path, array: np.ndarray, claimed: tuple[int, ...] | None = None) -> None:
    shape = claimed or array.shape
    header = b"\0\0\x08" + bytes([len(shape)]) + b"".join(n.to_bytes(4, "big") for n in shape)
    content = header + array.tobytes()
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)


def test_image_folder_classes_are_whole_relative_folders(tmp_path) -> None:
    for name in ("a/x/1.png", "b/x/2.PNG", "b/x/.hidden.png", "b/notes.txt", "top.jpeg"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(png(1))
    source = open_source(f"imagefolder:{tmp_path}")
    assert source.class_names == ("a/x", "b/x")
    records = records_of(f"imagefolder:{tmp_path}")
    assert [(r.key, r.label) for r in records] == [
        ("a/x/1.png", 0),
        ("b/x/2.PNG", 1),
        ("top.jpeg", None),
    ]


def test_flat_image_folder_has_no_classes(tmp_path) -> None:
    (tmp_path / "1.png").write_bytes(png(1))
    assert open_source(f"imagefolder:{tmp_path}").class_names is None


@pytest.mark.parametrize("target", [".", "..", "/"])
def test_folder_links_are_not_followed(tmp_path: Path, target: str) -> None:
    """A link back to the folder, or above it, would give every picture again and again."""
    (tmp_path / "photos" / "a").mkdir(parents=True)
    (tmp_path / "photos" / "a" / "1.png").write_bytes(png(1))
    (tmp_path / "photos" / "a" / "same.png").symlink_to("1.png")
    (tmp_path / "photos" / "a" / "round").symlink_to(target)
    source = open_source(f"imagefolder:{tmp_path}/photos")
    assert source.class_names == ("a",)
    records = records_of(f"imagefolder:{tmp_path}/photos")
    assert [(r.key, r.error) for r in records] == [
        ("a/1.png", None),
        ("a/same.png", None),
        ("a/round", "linked_folder"),
    ]


def test_a_folder_may_itself_be_a_link(tmp_path: Path) -> None:
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "1.png").write_bytes(png(1))
    (tmp_path / "link").symlink_to("photos")
    assert [r.key for r in records_of(f"imagefolder:{tmp_path}/link")] == ["1.png"]


def test_pipes_devices_and_links_to_them_are_not_opened(tmp_path: Path) -> None:
    """Reading them may never end; a link to itself must not refuse the whole folder."""
    (tmp_path / "1.png").write_bytes(png(1))
    os.mkfifo(tmp_path / "2.png")
    (tmp_path / "3.png").symlink_to("2.png")
    (tmp_path / "4.png").symlink_to("/dev/zero")
    (tmp_path / "5.png").symlink_to("5.png")
    (tmp_path / "6.png").symlink_to("nowhere")
    records = records_of(f"imagefolder:{tmp_path}")
    assert [(r.key, r.error) for r in records] == [
        ("1.png", None),
        ("2.png", "not_a_file"),
        ("3.png", "not_a_file"),
        ("4.png", "not_a_file"),
        ("5.png", "broken_link"),
        ("6.png", "broken_link"),
    ]


def test_file_names_need_not_be_utf8(tmp_path: Path) -> None:
    folder = os.path.join(os.fsencode(tmp_path), b"caf\xe9")
    os.mkdir(folder)
    for name in (b"\xff.png", b"plain.png"):
        with open(os.path.join(folder, name), "wb") as file:
            file.write(png(len(name)))
    source = open_source(f"imagefolder:{tmp_path}")
    assert source.class_names == ("caf\\xe9",)
    records = records_of(f"imagefolder:{tmp_path}")
    assert [(r.key, r.label) for r in records] == [
        ("caf\\xe9/plain.png", 0),
        ("caf\\xe9/\\xff.png", 0),
    ]
    assert all(r.content for r in records)


@pytest.mark.parametrize("suffix", [b".tar", b".tar.gz"])
def test_tar_names_need_not_be_utf8(tmp_path: Path, suffix: bytes) -> None:
    plain = tmp_path / ("a" + suffix.decode())
    write_tar(plain, [("1.png", png(1)), ("1.cls", b"4")])
    plain.rename(os.fsdecode(os.path.join(os.fsencode(tmp_path), b"\xe9" + suffix)))
    (record,) = records_of(f"webdataset:{tmp_path}")
    assert record.content and record.label == 4 and record.key.startswith("\\xe9.tar")


def test_listing_digest_sees_every_change(tmp_path: Path) -> None:
    for name in ("1.png", "2.png"):
        (tmp_path / name).write_bytes(png(1))

    def digest() -> str:
        return open_source(f"imagefolder:{tmp_path}").listing_digest()

    found = [digest()]
    assert digest() == found[0]
    (tmp_path / "2.png").rename(tmp_path / "3.png")
    found.append(digest())
    (tmp_path / "3.png").write_bytes(png(1) + b"x")
    found.append(digest())
    (tmp_path / "3.png").unlink()
    found.append(digest())
    assert len(set(found)) == 4


def test_unreadable_file_is_a_record_with_an_error(tmp_path) -> None:
    (tmp_path / "1.png").write_bytes(png(1))
    (tmp_path / "2.png").symlink_to(tmp_path / "nowhere")
    (tmp_path / "3.png").write_bytes(png(3))
    source = open_source(f"imagefolder:{tmp_path}")
    units = source.list_units()
    (tmp_path / "3.png").unlink()
    records = [record for unit in units for record in source.read_unit(unit)]
    assert [r.error for r in records if r.key != "2.png"] == [None, "unreadable_file"]


@pytest.mark.parametrize(
    ("uri", "message"),
    [
        ("imagefolder:{}/none", "does not exist"),
        ("imagefolder:{}", "holds no image file"),
        ("webdataset:{}", "holds no tar"),
        ("idx:{}/none", "does not exist"),
        ("photos:{}", "KIND:WHERE"),
        ("/my/photos", "KIND:WHERE"),
        ("synthetic:clouds?num_images=5&size=32", "clouds"),
        ("synthetic:textures?num_images=5", "must be given"),
        ("synthetic:textures?num_images=five&size=32", "not understood"),
        ("synthetic:textures?num_images=5&size=32&sedd=1", "sedd"),
    ],
)
def test_impossible_sources_say_what_to_do(tmp_path, uri: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        open_source(uri.format(tmp_path))


def test_webdataset_conventions(tmp_path) -> None:
    write_tar(
        tmp_path / "00000.tar",
        [
            ("000.jpg", png(0)),
            ("000.cls", b"7\n"),
            ("000.txt", b"a caption"),
            ("deep/001.JPG", png(1)),
            ("deep/001.json", b'{"label": 3}'),
            ("002.seg.png", png(99)),
            ("002.png", png(2)),
            ("003.v1.jpg", png(3)),
            ("003.v2.jpg", png(4)),
            ("004.txt", b"no image here"),
            ("005.jpg", png(5)),
            ("005.pyd", b"cos\nsystem\n(S'exit 1'\ntR."),
            ("000.jpg", png(6)),
        ],
    )
    records = records_of(f"webdataset:{tmp_path}")
    values = [decode_image(r.content).rgb[0, 0, 0] if r.content else r.error for r in records]
    assert values == [0, 1, 2, 3, "no_image", 5, 6]
    assert [r.label for r in records] == [7, 3, None, None, None, None, None]
    assert len({r.key for r in records}) == len(records), "a key repeated in a tar stays distinct"


def test_img2dataset_folder_and_one_tar(tmp_path) -> None:
    (tmp_path / "00000.parquet").write_bytes(b"rows, failed ones too")
    (tmp_path / "00000_stats.json").write_bytes(b'{"successes": 2}')
    write_tar(tmp_path / "00000.tar", [("000000000.jpg", png(0)), ("000000003.jpg", png(1))])
    write_tar(tmp_path / "00001.tar.gz", [("000010000.jpg", png(2))])
    assert len(records_of(f"webdataset:{tmp_path}")) == 3
    assert len(records_of(f"webdataset:{tmp_path / '00000.tar'}")) == 2
    assert len(records_of(f"webdataset:{tmp_path / '00001.tar.gz'}")) == 1
    (tmp_path / "00001.tar.gz").rename(tmp_path / "00001.tar")
    (tmp_path / "00000.tar").rename(tmp_path / "00000.tgz")
    records = records_of(f"webdataset:{tmp_path}")
    assert len(records) == 3 and not any(r.error for r in records), "a name does not tell"


def test_truncated_tar_gives_what_it_has_and_one_error(tmp_path) -> None:
    write_tar(tmp_path / "a.tar", [(f"{i}.png", png(i)) for i in range(4)])
    content = (tmp_path / "a.tar").read_bytes()
    (tmp_path / "a.tar").write_bytes(content[: 3 * 1024 + 600])
    records = records_of(f"webdataset:{tmp_path}")
    assert [r.error for r in records] == [None, None, None, "truncated_tar"]
    write_tar(tmp_path / "b.tar.gz", [(f"{i}.png", png(i)) for i in range(4)])
    compressed = (tmp_path / "b.tar.gz").read_bytes()
    (tmp_path / "b.tar.gz").write_bytes(compressed[: len(compressed) // 2])
    assert records_of(f"webdataset:{tmp_path / 'b.tar.gz'}")[-1].error == "truncated_tar"


def test_idx_headers_that_cannot_be(tmp_path) -> None:
    """Dimensions of 2^32 - 1 are a cut-off file; labels that are missing are refused."""
    images = tmp_path / "some-images-idx3-ubyte"
    images.write_bytes(bytes([0, 0, 8, 3]) + b"\xff" * 12 + bytes(500))
    (record,) = records_of(f"idx:{images}")
    assert record.error == "truncated_file"
    header = np.array([5, 4, 4], ">u4").tobytes()
    images.write_bytes(bytes([0, 0, 8, 3]) + header + bytes(5 * 16))
    labels = tmp_path / "some-labels-idx1-ubyte"
    labels.write_bytes(bytes([0, 0, 8, 1]) + header[:4] + bytes(3))
    with pytest.raises(ValueError, match="ends after 3 of its 5 labels"):
        open_source(f"idx:{images}")
    with pytest.raises(ValueError, match="is a folder: give the file"):
        open_source(f"idx:{tmp_path}")


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_idx_with_labels_found_beside_it(tmp_path, suffix: str, rng) -> None:
    images = rng.integers(0, 256, (12, 5, 4), dtype=np.uint8)
    write_idx(tmp_path / f"train-images-idx3-ubyte{suffix}", images)
    write_idx(tmp_path / f"train-labels-idx1-ubyte{suffix}", np.arange(12, dtype=np.uint8))
    records = records_of(f"idx:{tmp_path}/train-images-idx3-ubyte{suffix}")
    assert all((r.content == image).all() for r, image in zip(records, images, strict=True))
    assert [r.label for r in records] == list(range(12))


def test_idx_without_labels_and_with_named_ones(tmp_path, rng) -> None:
    write_idx(tmp_path / "pictures", rng.integers(0, 256, (3, 5, 4, 3), dtype=np.uint8))
    write_idx(tmp_path / "classes", np.array([2, 1, 0], np.uint8))
    write_idx(tmp_path / "other", np.array([2, 1], np.uint8))
    assert [r.label for r in records_of(f"idx:{tmp_path}/pictures")] == [None] * 3
    uri = f"idx:{tmp_path}/pictures,{tmp_path}/classes"
    assert [r.label for r in records_of(uri)] == [2, 1, 0]
    with pytest.raises(ValueError, match="has shape"):
        open_source(f"idx:{tmp_path}/pictures,{tmp_path}/other")
    with pytest.raises(ValueError, match="images must be"):
        open_source(f"idx:{tmp_path}/classes")
    (tmp_path / "junk").write_bytes(b"hello world")
    with pytest.raises(ValueError, match="not an IDX file"):
        open_source(f"idx:{tmp_path}/junk")


def test_cut_off_idx_gives_its_whole_images_and_one_error(tmp_path, rng) -> None:
    images = rng.integers(0, 256, (3, 5, 4), dtype=np.uint8)
    write_idx(tmp_path / "cut", images, claimed=(4_000_000_000, 5, 4))
    assert [r.error for r in records_of(f"idx:{tmp_path}/cut")] == [None] * 3 + ["truncated_file"]
    write_idx(tmp_path / "whole.gz", rng.integers(0, 256, (300, 5, 4), dtype=np.uint8))
    content = (tmp_path / "whole.gz").read_bytes()
    (tmp_path / "cut.gz").write_bytes(content[:3000])
    errors = [r.error for r in records_of(f"idx:{tmp_path}/cut.gz")]
    assert errors[-1] == "truncated_file" and errors.count(None) == len(errors) - 1 > 20


def test_synthetic_families_take_turns() -> None:
    uri = "synthetic:dead_leaves+textures?num_images=7&size=16&seed=5"
    records = records_of(uri)
    assert [r.key for r in records[:3]] == ["dead_leaves/5/0", "textures/5/0", "dead_leaves/5/1"]
    for index, record in enumerate(records):
        family = ("dead_leaves", "textures")[index % 2]
        assert (record.content == generate_image(family, 5, index // 2, 16)).all()
