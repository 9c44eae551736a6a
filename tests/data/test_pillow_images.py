"""Real files: the 1,060 odd, broken and hostile ones that Pillow tests itself with.

They come from the source distribution of the Pillow that is installed, fetched by pip once and kept
in the user's cache folder; where it cannot be had these tests are skipped and say so.
"""

from __future__ import annotations

import io
import os
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

import numpy as np
import PIL
import pytest
from PIL import Image, ImageOps

from pipeline.data.images import PILLOW_FORMATS, ImageError, decode_image
from pipeline.data.prepare import PrepareConfig, prepare, read_summary
from pipeline.storage import Location

CACHE = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "dp-pretrain/tests"
LARGEST = 20_000_000

REASONS = {
    *("empty", "unknown_format", "truncated_or_damaged", "too_many_pixels", "no_pixels"),
    *("pixel_range_unknown", "too_many_bytes"),
}
RANGE_UNKNOWN = {
    "10ct_32bit_128.tiff": "floating point numbers",
    "hopper.pfm": "floating point numbers",
    "hopper_be.pfm": "floating point numbers",
    "8bit.s.tif": "signed 8 bits",
    "separate_planar_extra_samples.tiff": "signed 8 bits",
    "16bit.s.tif": "signed 16 bits",
    "16_bit_binary_pgm.tiff": "32 bits, of which 16 are used",
}
"""Pillow opens these, and does not say which number is white."""


@pytest.fixture(scope="module")
def pillow_images() -> dict[str, bytes]:
    """Name -> content of all files below Tests/images."""
    archive = CACHE / f"pillow-{PIL.__version__}.tar.gz"
    if not archive.exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=CACHE) as scratch:
            command = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check"]
            wanted = ["--no-deps", "--no-binary", "pillow", f"pillow=={PIL.__version__}"]
            try:
                done = subprocess.run(
                    [*command, *wanted, "--dest", scratch],
                    capture_output=True,
                    text=True,
                    check=False,
                    timeout=300,
                )
                problem = (done.stderr.strip() or f"pip ended with {done.returncode}")[-300:]
            except (OSError, subprocess.TimeoutExpired) as error:
                problem = str(error)
            found = list(Path(scratch).glob("*.tar.gz"))
            if not found:
                pytest.skip(f"no source distribution of Pillow {PIL.__version__}: {problem}")
            os.replace(found[0], archive)
    with tarfile.open(archive) as tar:
        files = {
            member.name.partition("Tests/images/")[2]: tar.extractfile(member).read()
            for member in tar
            if member.isfile() and "Tests/images/" in member.name
        }
    assert len(files) > 1_000
    return files


def decoded(content: bytes) -> np.ndarray | str:
    try:
        return decode_image(content, max_pixels=LARGEST).pixels
    except ImageError as error:
        return error.reason


def by_pillow(content: bytes) -> Image.Image | None:
    """What Pillow makes of a file, of a format that is accepted here; None where it refuses."""
    try:
        image = Image.open(io.BytesIO(content))
        if image.format not in (*PILLOW_FORMATS, "MPO") or image.width * image.height > LARGEST:
            return None
        image.load()
        return ImageOps.exif_transpose(image)
    except Exception:
        return None


def over_white(image: Image.Image) -> np.ndarray:
    rgba = image.convert("RGBA")
    white = Image.new("RGBA", rgba.size, "white")
    return np.asarray(Image.alpha_composite(white, rgba).convert("RGB")).astype(int)


def deep_grey(image: Image.Image, name: str) -> np.ndarray:
    """Grey of more than 8 bits as 8, by the range that is known of each of these files."""
    values = np.asarray(image).astype(float)
    grey = values * 255 / (4095 if name == "12bit.cropped.tif" else 65535)
    if "transparency" in image.info:
        grey[values == image.info["transparency"]] = 255
    return grey


@pytest.mark.filterwarnings("ignore")  # of Pillow, in our reading of them as the oracle
def test_every_file_is_the_picture_that_pillow_shows_or_is_refused(
    pillow_images: dict[str, bytes],
) -> None:
    num_same = 0
    for name, content in pillow_images.items():
        ours, expected = decoded(content), by_pillow(content)
        if isinstance(ours, str):
            assert ours in REASONS, name
            if expected is not None:
                assert ours == "pixel_range_unknown" and name in RANGE_UNKNOWN, (name, ours)
            continue
        assert expected is not None, f"{name}: Pillow refuses it"
        assert name not in RANGE_UNKNOWN
        if expected.mode.startswith("I"):
            assert np.abs(ours[:, :, 0] - deep_grey(expected, name)).max() < 1, name
        else:
            picture = over_white(expected)
            assert ours.shape[:2] == picture.shape[:2], name
            difference = np.abs(ours.astype(int) - picture)  # C = 1 broadcasts
            assert difference.mean() < 0.5 and difference.max() <= 8, name
        num_same += 1
    assert num_same > 680


def test_prepare_reads_them_all_and_says_what_it_left_out(
    pillow_images: dict[str, bytes], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """As a shard whose suffixes all lie: no process dies, no record is lost from the books."""
    with tarfile.open(tmp_path / "odd.tar", "w") as tar:
        for number, content in enumerate(pillow_images.values()):
            info = tarfile.TarInfo(f"{number:06d}.jpg")
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    config = PrepareConfig(
        name="odd", source=f"webdataset:{tmp_path}", visibility="public", image_short_side=64
    )
    root = Location(str(tmp_path / "prepared"))
    manifest = prepare(config, root, num_workers=1)[""]
    summary = read_summary(root)
    left_out = {reason: num for reason, num in summary["left_out"].items() if num}
    assert manifest.num_records + sum(left_out.values()) == len(pillow_images)
    assert set(left_out) <= REASONS | {"duplicate"} and manifest.num_records > 500, left_out
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("kind", "mode", "options", "allowed"),
    [
        ("PNG", "RGB", {}, 0),
        ("PNG", "RGBA", {}, 0),
        ("TIFF", "RGB", {"compression": "tiff_lzw"}, 0),
        ("BMP", "RGB", {}, 0),
        ("PPM", "RGB", {}, 0),
        ("WEBP", "RGB", {"lossless": True}, 0),
        ("WEBP", "RGB", {"quality": 95}, 4),
        ("JPEG", "RGB", {"quality": 95, "progressive": True}, 4),
        ("JPEG", "CMYK", {"quality": 95}, 6),
        ("JPEG", "L", {"quality": 95}, 4),
        ("JPEG2000", "RGB", {"irreversible": False}, 0),
        ("TIFF", "CMYK", {}, 4),
        ("TIFF", "LAB", {}, 4),
        ("GIF", "P", {}, 0),
        ("AVIF", "RGB", {"quality": 95}, 4),
        ("HEIF", "RGB", {"quality": 95}, 4),
    ],
)
def test_a_photograph_survives_every_format(
    pillow_images: dict[str, bytes], kind: str, mode: str, options: dict, allowed: float
) -> None:
    if kind not in PILLOW_FORMATS:
        pytest.skip(f"this Pillow reads no {kind}")
    photograph = Image.open(io.BytesIO(pillow_images["flower.jpg"])).convert("RGB")
    expected = np.asarray(photograph.convert("L").convert("RGB") if mode == "L" else photograph)
    if mode == "LAB":
        from PIL import ImageCms

        profiles = ImageCms.createProfile("sRGB"), ImageCms.createProfile("LAB")
        stored = ImageCms.profileToProfile(photograph, *profiles, outputMode="LAB")
    elif mode == "P":
        stored = photograph.quantize(256)
        expected = np.asarray(stored.convert("RGB"))
    else:
        stored = photograph.convert(mode)
    stream = io.BytesIO()
    stored.save(stream, kind, **options)
    image = decode_image(stream.getvalue())
    assert image.format == kind
    assert np.abs(image.rgb.astype(int) - expected).mean() <= allowed
