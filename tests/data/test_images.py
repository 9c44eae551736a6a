"""images.py: no picture is decoded to a wrong one; crops follow torchvision's rules."""

from __future__ import annotations

import io
import struct
import zlib

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image

from pipeline.data import images
from pipeline.data.images import (
    NUM_CROP_UNIFORMS,
    ImageError,
    center_view,
    crop_and_resize,
    decode_image,
    decode_stored,
    encode_jpeg,
    random_crop_boxes,
    random_resized_crop_flip,
    resize_short_side,
)


def encoded(image: Image.Image, kind: str, **options) -> bytes:
    stream = io.BytesIO()
    image.save(stream, kind, **options)
    return stream.getvalue()


def smooth(height: int, width: int) -> np.ndarray:
    """A colour picture without symmetry: red grows to the right, green downwards."""
    y, x = np.mgrid[:height, :width]
    return np.stack(
        [x * 255 // (width - 1), y * 255 // (height - 1), (x + 2 * y) % 256], axis=-1
    ).astype(np.uint8)


def test_sixteen_bit_grey_is_scaled_and_not_white() -> None:
    ramp = np.linspace(0, 65535, 256).astype(np.uint16).reshape(16, 16)
    for kind in ("PNG", "TIFF"):
        pixels = decode_image(encoded(Image.fromarray(ramp), kind)).pixels
        assert pixels.shape == (16, 16, 1)
        assert np.abs(pixels[:, :, 0].astype(int) - np.arange(256).reshape(16, 16)).max() <= 1


def test_sixteen_bit_pgm_is_scaled() -> None:
    ramp = np.linspace(0, 65535, 256).astype(">u2").reshape(16, 16)
    content = b"P5 16 16 65535\n" + ramp.tobytes()
    pixels = decode_image(content).pixels[:, :, 0]
    assert np.abs(pixels.astype(int) - np.arange(256).reshape(16, 16)).max() <= 1


def test_float_pixels_without_a_stated_range_are_refused() -> None:
    content = encoded(Image.fromarray(np.ones((4, 4), np.float32)), "TIFF")
    with pytest.raises(ImageError, match="pixel_range_unknown"):
        decode_image(content)


def grey_tiff(values: np.ndarray, num_bits: int, **fields: int) -> bytes:
    """A TIFF of one strip, written by hand: Pillow writes none of the odd ones."""
    if num_bits == 12:
        digits = "".join(f"{value:03x}" for value in values.ravel())
        strip = bytes.fromhex(digits)
    else:
        strip = values.astype(f"<u{num_bits // 8}").tobytes()
    height, width = values.shape
    tags = {256: width, 257: height, 258: num_bits, 259: 1, 262: fields.get("photometric", 1)}
    tags |= {273: 8, 277: 1, 278: height, 279: len(strip), 339: fields.get("sample_format", 1)}
    entries = b"".join(struct.pack("<HHII", tag, 3, 1, value) for tag, value in tags.items())
    head = b"II*\0" + struct.pack("<I", 8 + len(strip))
    return head + strip + struct.pack("<H", len(tags)) + entries + bytes(4)


@pytest.mark.parametrize(("num_bits", "photometric"), [(8, 0), (8, 1), (12, 1), (16, 0), (16, 1)])
def test_tiff_grey_is_scaled_by_its_own_bits_and_white(num_bits: int, photometric: int) -> None:
    """12 bits were almost black, and 16 bits with white at 0 a negative."""
    values = np.linspace(0, 2**num_bits - 1, 256).astype(np.int64).reshape(16, 16)
    grey = decode_image(grey_tiff(values, num_bits, photometric=photometric)).pixels[:, :, 0]
    expected = np.arange(256).reshape(16, 16)
    expected = expected if photometric else 255 - expected
    assert np.abs(grey.astype(int) - expected).max() <= 1


@pytest.mark.parametrize(
    ("num_bits", "sample_format"), [(8, 2), (16, 2), (32, 1), (32, 2)], ids=lambda n: f"{n}"
)
def test_numbers_whose_white_is_not_known_are_refused(num_bits: int, sample_format: int) -> None:
    values = np.arange(256).reshape(16, 16) % 128
    with pytest.raises(ImageError, match="pixel_range_unknown"):
        decode_image(grey_tiff(values, num_bits, sample_format=sample_format))


def test_the_transparent_grey_of_sixteen_bits_is_white() -> None:
    values = np.linspace(0, 65535, 256).astype(np.uint16).reshape(16, 16)
    content = encoded(Image.fromarray(values), "PNG")
    chunk = b"tRNS" + struct.pack(">H", values[2, 3])
    chunk = struct.pack(">I", 2) + chunk + struct.pack(">I", zlib.crc32(chunk))
    before_pixels = content.index(b"IDAT") - 4
    content = content[:before_pixels] + chunk + content[before_pixels:]
    grey = decode_image(content).pixels[:, :, 0].astype(int)
    expected = np.arange(256).reshape(16, 16)
    expected[2, 3] = 255
    assert np.abs(grey - expected).max() <= 1


def test_alpha_is_laid_over_white() -> None:
    rgba = np.zeros((4, 4, 4), np.uint8)
    rgba[:2] = (255, 0, 0, 255)
    rgba[2, :] = (255, 0, 0, 128)
    pixels = decode_image(encoded(Image.fromarray(rgba), "PNG")).rgb
    assert (pixels[0] == (255, 0, 0)).all()
    assert np.abs(pixels[2].astype(int) - (255, 127, 127)).max() <= 1
    assert (pixels[3] == 255).all()


def test_palette_and_its_transparency() -> None:
    image = Image.fromarray(smooth(8, 8)).convert("P")
    expected = np.asarray(image.convert("RGB"))
    assert (decode_image(encoded(image, "PNG")).rgb == expected).all()
    image = Image.new("P", (4, 4), 0)
    image.putpalette([0, 0, 0, 200, 10, 10])
    image.putpixel((0, 0), 1)
    pixels = decode_image(encoded(image, "PNG", transparency=0)).rgb
    assert (pixels[0, 0] == (200, 10, 10)).all()
    assert (pixels[3, 3] == 255).all()


def test_cmyk_jpeg_is_not_inverted() -> None:
    image = Image.fromarray(smooth(32, 32))
    pixels = decode_image(encoded(image.convert("CMYK"), "JPEG", quality=95)).rgb
    assert np.abs(pixels.astype(int) - np.asarray(image)).mean() < 12


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "TIFF"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_orientation_is_applied_once(kind: str, orientation: int) -> None:
    upright = Image.fromarray(smooth(24, 40))
    # The stored picture is the one that the orientation turns into the upright one.
    undo = {
        2: Image.Transpose.FLIP_LEFT_RIGHT,
        3: Image.Transpose.ROTATE_180,
        4: Image.Transpose.FLIP_TOP_BOTTOM,
        5: Image.Transpose.TRANSPOSE,
        6: Image.Transpose.ROTATE_90,
        7: Image.Transpose.TRANSVERSE,
        8: Image.Transpose.ROTATE_270,
    }
    stored = upright.transpose(undo[orientation]) if orientation in undo else upright
    exif = Image.Exif()
    exif[0x0112] = orientation
    lossless = {"lossless": True} if kind == "WEBP" else {}
    pixels = decode_image(encoded(stored, kind, exif=exif.tobytes(), **lossless)).rgb
    assert pixels.shape == (24, 40, 3)
    difference = np.abs(pixels.astype(int) - np.asarray(upright)).mean()
    assert difference < (20 if kind == "JPEG" else 0.01)


def test_first_frame_of_an_animation() -> None:
    frames = [Image.new("RGB", (8, 8), colour) for colour in ("red", "blue")]
    for kind in ("GIF", "PNG", "WEBP"):
        content = encoded(frames[0], kind, save_all=True, append_images=frames[1:])
        red, _, blue = decode_image(content).rgb[4, 4].astype(int)
        assert red > 240 and blue < 15


def test_grey_pictures_have_one_channel_whatever_their_file() -> None:
    grey = smooth(16, 16)[:, :, :1]
    as_rgb = Image.fromarray(np.broadcast_to(grey, (16, 16, 3)).copy())
    assert (decode_image(encoded(as_rgb, "PNG")).pixels == grey).all()
    assert decode_image(encoded(as_rgb, "JPEG")).pixels.shape == (16, 16, 1)


def test_jpeg_decoders_agree(rng: np.random.Generator) -> None:
    for size in ((17, 31), (64, 64)):
        content = encoded(Image.fromarray(smooth(*size)), "JPEG", quality=90)
        ours = decode_image(content).pixels.astype(int)
        pillow = np.asarray(Image.open(io.BytesIO(content)).convert("RGB")).astype(int)
        assert np.abs(ours - pillow).max() <= 2


def test_stored_records_decode_as_single_images_do() -> None:
    contents = [encode_jpeg(smooth(20, 30)), encode_jpeg(smooth(9, 9)[:, :, :1])]
    for content, pixels in zip(contents, decode_stored(contents), strict=True):
        assert pixels is not None and (pixels == decode_image(content).pixels).all()
    damaged = [contents[0], contents[1][:60], contents[1]]
    assert [pixels is None for pixels in decode_stored(damaged)] == [False, True, False]
    assert decode_stored([]) == []


def test_pillow_stands_in_for_torchvisions_jpeg(monkeypatch: pytest.MonkeyPatch) -> None:
    """A later torchvision has no JPEG codec any more."""
    pictures = [smooth(20, 30), smooth(9, 9)[:, :, :1]]
    before = [decode_image(encode_jpeg(picture)).pixels.astype(int) for picture in pictures]
    monkeypatch.setattr(images, "has_torchvision_jpeg", False)
    for name in ("torchvision_decode_jpeg", "torchvision_encode_jpeg"):
        monkeypatch.delattr(images, name)
    stored = [encode_jpeg(picture) for picture in pictures]
    for pixels, expected in zip(decode_stored(stored), before, strict=True):
        assert pixels is not None and pixels.shape == expected.shape
        assert np.abs(pixels - expected).max() <= 3
    assert decode_stored([stored[0][:60]]) == [None]


def test_resize_shrinks_the_short_side_and_never_enlarges() -> None:
    assert resize_short_side(smooth(100, 50), 25).shape == (50, 25, 3)
    assert resize_short_side(smooth(30, 90), 20).shape == (20, 60, 3)
    small = smooth(28, 28)
    assert resize_short_side(small, 28) is small and resize_short_side(small, 64) is small


@pytest.mark.parametrize("side", [28, 50, 90])
def test_views_equal_torch_antialiased_bicubic(side: int, rng: np.random.Generator) -> None:
    """Both the small-image products and the per-image path, against float interpolation."""
    images = [smooth(side, side), smooth(side, side)[:, :, :1]]
    uniforms = rng.random((2, NUM_CROP_UNIFORMS))
    sides = np.array([side, side])
    boxes, _ = random_crop_boxes(sides, sides, uniforms, (0.2, 1.0))
    for flip in (False, True):
        views = crop_and_resize(images, boxes, np.array([flip, flip]), 32)
        for image, (top, left, height, width), view in zip(images, boxes, views, strict=True):
            box = image[top : top + height, left : left + width].transpose(2, 0, 1)
            expected = F.interpolate(
                torch.from_numpy(box.astype(np.float32))[None],
                size=(32, 32),
                mode="bicubic",
                antialias=True,
            )[0].clamp(0, 255)
            expected = expected.expand(3, -1, -1).numpy()
            expected = expected[:, :, ::-1] if flip else expected
            # Up to 64 pixels exact to rounding; above, torch rounds between its two passes.
            assert np.abs(view - expected).max() <= (0.51 if side <= 64 else 2.0)


def test_crops_have_the_distribution_of_random_resized_crop(rng: np.random.Generator) -> None:
    """Area uniform in the scale, aspect log-uniform, position uniform, half of them flipped."""
    num = 20_000
    heights, widths = np.full(num, 1000), np.full(num, 1000)
    boxes, flips = random_crop_boxes(
        heights, widths, rng.random((num, NUM_CROP_UNIFORMS)), (0.2, 0.7)
    )
    top, left, height, width = boxes.T
    assert (top >= 0).all() and (left >= 0).all()
    assert (top + height <= 1000).all() and (left + width <= 1000).all()
    area = height * width / 1e6
    assert abs(area.mean() - 0.45) < 0.005 and area.min() > 0.195 and area.max() < 0.705
    assert abs(np.log(width / height).mean()) < 0.01
    assert abs(np.log(width / height).std() - np.log(4 / 3) / np.sqrt(3)) < 0.005
    free = height < 1000
    assert abs((top[free] / (1000 - height[free])).mean() - 0.5) < 0.01
    assert abs(flips.mean() - 0.5) < 0.015


def test_crop_of_a_very_wide_image_falls_back_to_its_centre() -> None:
    boxes, _ = random_crop_boxes(
        np.array([10]), np.array([1000]), np.full((1, NUM_CROP_UNIFORMS), 0.9), (0.9, 1.0)
    )
    top, left, height, width = boxes[0]
    assert (top, height) == (0, 10) and width == 13 and left == (1000 - 13) // 2


def test_single_image_helpers() -> None:
    image = smooth(40, 60)
    assert center_view(image, 40).shape == (3, 40, 40)
    assert (center_view(image, 40) == image[:, 10:50].transpose(2, 0, 1)).all()
    view = random_resized_crop_flip(image, np.full(NUM_CROP_UNIFORMS, 0.5), 24)
    assert view.shape == (3, 24, 24) and view.dtype == np.uint8
