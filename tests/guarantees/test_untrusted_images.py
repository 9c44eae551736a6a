"""Pitfall 28: damaged PNG, truncated JPEG, decompression bombs, tars that point elsewhere."""

from __future__ import annotations

import io
import struct
import tarfile
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from pipeline.data import images
from pipeline.data.images import ImageError, decode_image
from pipeline.data.prepare import PrepareConfig, prepare, read_summary
from pipeline.data.synthetic import generate_image
from pipeline.storage import Location

FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "JPEG2000")


def encoded(kind: str, size: int = 48) -> bytes:
    stream = io.BytesIO()
    Image.fromarray(generate_image("dead_leaves", 0, 0, size)).save(stream, kind)
    return stream.getvalue()


def png_that_claims(width: int, height: int) -> bytes:
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(bytes(100_000))), (b"IEND", b""))
    parts = [b"\x89PNG\r\n\x1a\n"]
    for kind, body in chunks:
        check = struct.pack(">I", zlib.crc32(kind + body))
        parts += [struct.pack(">I", len(body)), kind, body, check]
    return b"".join(parts)


def jpeg_that_claims(width: int, height: int) -> bytes:
    content = bytearray(encoded("JPEG"))
    frame = next(
        i for i in range(len(content)) if content[i] == 0xFF and content[i + 1] in (0xC0, 0xC2)
    )
    content[frame + 5 : frame + 9] = struct.pack(">HH", height, width)
    return bytes(content)


def test_bombs_are_refused_by_their_header(monkeypatch) -> None:
    monkeypatch.setattr(images, "torchvision_decode_jpeg", lambda *a: pytest.fail("decoded"))
    monkeypatch.setattr(Image.Image, "convert", lambda *a, **k: pytest.fail("decoded"))
    for bomb in (
        png_that_claims(60_000, 60_000),
        png_that_claims(12_000, 12_000),
        jpeg_that_claims(65_000, 65_000),
    ):
        assert len(bomb) < 20_000
        with pytest.raises(ImageError, match="too_many_pixels"):
            decode_image(bomb)
    with pytest.raises(ImageError, match="too_many_bytes"):
        decode_image(bytes(1000), max_bytes=999)


@pytest.mark.parametrize("kind", FORMATS)
def test_truncated_files_are_never_half_a_picture(kind: str) -> None:
    content = encoded(kind)
    whole = decode_image(content).pixels
    for length in range(0, len(content), max(1, len(content) // 150)):
        try:
            pixels = decode_image(content[:length]).pixels
        except ImageError:
            continue
        assert np.array_equal(pixels, whole), f"cut to {length} of {len(content)} bytes"


@pytest.mark.parametrize("kind", FORMATS)
def test_damaged_files_raise_nothing_else(kind: str) -> None:
    content = encoded(kind)
    generator = np.random.default_rng(3)
    for _ in range(150):
        damaged = bytearray(content)
        for position in generator.integers(0, len(content), generator.integers(1, 20)):
            damaged[position] = generator.integers(256)
        try:
            decode_image(bytes(damaged))
        except ImageError as error:
            assert error.reason


def test_torchvision_sees_jpeg_only(monkeypatch) -> None:
    """torchvision 0.29 crashes the process on damaged PNG, whatever the file is called."""
    seen: list[bytes] = []
    original = images.torchvision_decode_jpeg

    def spy(data, *rest):
        parts = data if isinstance(data, list) else [data]
        seen.extend(bytes(part[:3].numpy()) for part in parts)
        return original(data, *rest)

    monkeypatch.setattr(images, "torchvision_decode_jpeg", spy)
    contents = [encoded(kind) for kind in FORMATS]
    contents += [content[: len(content) // 2] for content in contents] + [b"\x89PNG", b"\xff\xd8"]
    for content in contents:
        try:
            decode_image(content)
        except ImageError:
            pass
    images.decode_stored(contents)
    assert len(seen) >= 2 and set(seen) == {b"\xff\xd8\xff"}


def test_formats_that_run_programs_are_not_opened() -> None:
    postscript = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n%%EndComments\nshowpage\n"
    with pytest.raises(ImageError, match="unknown_format"):
        decode_image(postscript)
    assert not {"EPS", "PSD", "WMF", "PDF"} & set(images.PILLOW_FORMATS)


def test_tar_members_are_read_and_never_extracted(tmp_path: Path) -> None:
    sources = tmp_path / "in" / "deep"
    sources.mkdir(parents=True)
    with tarfile.open(sources / "evil.tar", "w") as tar:
        for name in ("../../evil.png", "/tmp/evil.png", "../in/deep/evil.tar.png", "good.png"):
            content = encoded("PNG", size=8 + len(name))
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
        link = tarfile.TarInfo("link.png")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/hostname"
        tar.addfile(link)
    before = sorted(tmp_path.rglob("*"))
    out = tmp_path / "out"
    config = PrepareConfig(name="t", source=f"webdataset:{sources}", visibility="public")
    manifest = prepare(config, Location(str(out)), num_workers=1)[""]
    assert manifest.num_records == 4
    assert sorted(p for p in tmp_path.rglob("*") if out not in p.parents and p != out) == before
    assert not Path("/tmp/evil.png").exists()


def test_broken_tars_cost_their_broken_members_only(tmp_path: Path) -> None:
    def write(path: Path, names: list[str]) -> None:
        with tarfile.open(path, "w") as tar:
            for number, name in enumerate(names):
                content = encoded("PNG", size=20 + number + 10 * int(path.stem))
                info = tarfile.TarInfo(name)
                info.size = len(content)
                tar.addfile(info, io.BytesIO(content))

    for stem in "012":
        write(tmp_path / f"{stem}.tar", [f"{i}.png" for i in range(5)])
    damaged = bytearray((tmp_path / "0.tar").read_bytes())
    damaged[2] ^= 0xFF  # the first header: one sample lost
    (tmp_path / "0.tar").write_bytes(damaged)
    whole = (tmp_path / "1.tar").read_bytes()
    (tmp_path / "1.tar").write_bytes(whole[: whole.rindex(b"IEND") - 100])  # the last one cut
    (tmp_path / "3.tar").write_bytes(b"\0" * 511 + b"x")  # no tar at all
    out = Location(str(tmp_path / "out"))
    config = PrepareConfig(name="t", source=f"webdataset:{tmp_path}", visibility="public")
    assert prepare(config, out)[""].num_records == 4 + 4 + 5
    assert read_summary(out)["left_out"] == {"damaged_tar_header": 2, "truncated_tar": 1}
