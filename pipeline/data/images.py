"""Bytes to pixels, safely; pixels to views (crop, resize, flip) that depend on the record alone.

Two decoders, chosen by the first bytes and never by the file name: torchvision for JPEG (twice as
fast), Pillow for everything else, since torchvision crashes the process on damaged PNG files.
Where torchvision has no JPEG codec (deprecated since 0.29), Pillow does that too.
Pixels are uint8 arrays [H, W, C] with C = 1 when all three channels agree, else 3.
"""

from __future__ import annotations

import contextlib
import functools
import io
import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from PIL import Image

try:
    from torchvision.io import ImageReadMode
    from torchvision.io import decode_jpeg as torchvision_decode_jpeg
    from torchvision.io import encode_jpeg as torchvision_encode_jpeg

    has_torchvision_jpeg = True
except ImportError:
    has_torchvision_jpeg = False

Pixels = npt.NDArray[np.uint8]

MAX_IMAGE_PIXELS = 89_478_485  # Pillow's own limit: 256 MiB of RGB
MAX_IMAGE_BYTES = 256 * 2**20
MAX_JPEG_SIDE = 65_500

# Formats that Pillow may open, if it was built with them (HEIF: where pillow-heif is installed).
# Left out on purpose: vectors, and those that start programs (EPS).
Image.init()
with contextlib.suppress(ImportError):
    import pillow_heif

    pillow_heif.register_heif_opener()
PILLOW_FORMATS = tuple(
    name
    for name in (
        *("PNG", "WEBP", "BMP", "DIB", "TIFF", "GIF", "PPM", "AVIF", "HEIF", "JPEG", "JPEG2000"),
    )
    if name in Image.OPEN
)
TIFF_BITS, TIFF_PHOTOMETRIC, TIFF_SAMPLE_FORMAT = 258, 262, 339
TIFF_WHITE_IS_ZERO, TIFF_UNSIGNED, TIFF_UNDEFINED = 0, 1, 4

# A crop needs 10 tries of (area, aspect), a position (top, left) and a flip.
NUM_CROP_TRIES = 10
NUM_CROP_UNIFORMS = 2 * NUM_CROP_TRIES + 3
SMALL_SIDE = 64

# Pillow warns of odd tags and of large pictures. A picture is decoded or refused with a reason;
# a warning besides would only tell the console that some private file is odd.
warnings.filterwarnings("ignore", category=Image.DecompressionBombWarning)
warnings.filterwarnings("ignore", category=UserWarning, module=r"PIL\.")


class ImageError(ValueError):
    """These bytes are not a picture we accept; `reason` is a short code for a summary's counts."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


@dataclass(frozen=True, kw_only=True)
class DecodedImage:
    """A decoded picture, upright: uint8 [H, W, C], C = 1 if it is grey, else 3 (RGB)."""

    pixels: Pixels
    format: str

    @property
    def rgb(self) -> Pixels:
        """uint8 [H, W, 3], whatever the number of stored channels."""
        return np.ascontiguousarray(np.broadcast_to(self.pixels, (*self.pixels.shape[:2], 3)))


def decode_image(
    content: bytes, *, max_pixels: int = MAX_IMAGE_PIXELS, max_bytes: int = MAX_IMAGE_BYTES
) -> DecodedImage:
    """Decode untrusted bytes into an upright 8-bit picture, or refuse.

    The first frame of an animation is taken; the EXIF orientation is applied; 16-bit grey is
    scaled to 8 bits; alpha is laid over white; palettes, CMYK and other colour spaces become RGB.

    Args:
        content: an encoded image of any accepted format, from an untrusted source.
        max_pixels: refuse images with more pixels, judged by the header before decoding.
        max_bytes: refuse longer content.

    Raises:
        ImageError: with a reason code; never any other exception for bad content.

    Guarantees:
        1. Refuses decompression bombs by their header (test_untrusted_images).
        2. A truncated file is refused, never half a picture (test_untrusted_images).
        3. torchvision sees JPEG only (test_untrusted_images).
    """
    if not content:
        raise ImageError("empty")
    if len(content) > max_bytes:
        raise ImageError("too_many_bytes")
    if content[:3] == b"\xff\xd8\xff":
        pixels, name = _decode_jpeg(content, max_pixels), "JPEG"
    else:
        pixels, name = _decode_with_pillow(content, max_pixels)
    return DecodedImage(pixels=canonical_pixels(pixels), format=name)


def canonical_pixels(pixels: Pixels) -> Pixels:
    """[H, W], [H, W, 1] or [H, W, 3] uint8 as contiguous [H, W, C], C = 1 if all channels agree.

    Raises:
        ImageError: the array is not such an image, or has no pixels.
    """
    if pixels.ndim == 2:
        pixels = pixels[:, :, None]
    if pixels.dtype != np.uint8 or pixels.ndim != 3 or pixels.shape[2] not in (1, 3):
        raise ImageError("unknown_format")
    if pixels.shape[0] < 1 or pixels.shape[1] < 1:
        raise ImageError("no_pixels")
    if pixels.shape[2] == 3:
        red = pixels[:, :, 0]
        # A row first: nearly every colour picture is told from a grey one by it.
        if all(
            (red[rows] == pixels[rows, :, channel]).all()
            for rows in (slice(0, 1), slice(None))
            for channel in (1, 2)
        ):
            pixels = pixels[:, :, :1]
    return np.ascontiguousarray(pixels)


def _decode_jpeg(content: bytes, max_pixels: int) -> Pixels:
    header = _read_jpeg_header(content)
    if header is None:  # junk between the markers, over which Pillow may find its way
        return _decode_with_pillow(content, max_pixels)[0]
    if header.width < 1 or header.height < 1:
        raise ImageError("no_pixels")
    if header.width * header.height > max_pixels:
        raise ImageError("too_many_pixels")
    if header.num_components not in (1, 3) or header.bits != 8 or not has_torchvision_jpeg:
        return _decode_with_pillow(content, max_pixels)[0]
    mode = ImageReadMode.GRAY if header.num_components == 1 else ImageReadMode.RGB
    try:
        image_CHW = torchvision_decode_jpeg(_as_tensor(content), mode)
    except Exception:
        # Pillow accepts a few more kinds (arithmetic coding), and refuses what is truncated.
        return _decode_with_pillow(content, max_pixels)[0]
    return _upright(image_CHW.permute(1, 2, 0).numpy(), header.orientation)


@dataclass(frozen=True, kw_only=True)
class _JpegHeader:
    width: int
    height: int
    num_components: int
    bits: int
    orientation: int


def _read_jpeg_header(content: bytes) -> _JpegHeader | None:
    """Walk the markers up to the frame header; None if there is none."""
    position, orientation = 2, 1
    while position + 4 <= len(content):
        if content[position] != 0xFF:
            return None
        marker = content[position + 1]
        if marker == 0xFF:  # fill byte
            position += 1
            continue
        if marker == 0x01 or 0xD0 <= marker <= 0xD8:  # markers without a length
            position += 2
            continue
        length = int.from_bytes(content[position + 2 : position + 4], "big")
        body = position + 4
        if 0xC0 <= marker <= 0xCF and marker not in (0xC4, 0xC8, 0xCC):
            frame = content[body : body + 6]
            if len(frame) < 6:
                return None
            return _JpegHeader(
                bits=frame[0],
                height=int.from_bytes(frame[1:3], "big"),
                width=int.from_bytes(frame[3:5], "big"),
                num_components=frame[5],
                orientation=orientation,
            )
        if marker in (0xD9, 0xDA) or length < 2:
            return None
        if marker == 0xE1 and content[body : body + 6] == b"Exif\x00\x00":
            orientation = _exif_orientation(content[body : body - 2 + length])
        position = body - 2 + length
    return None


def _exif_orientation(block: bytes) -> int:
    try:
        exif = Image.Exif()
        exif.load(block)
        return int(exif.get(0x0112, 1))
    except Exception:  # damaged EXIF says nothing about the pixels
        return 1


def _upright(pixels: Pixels, orientation: int) -> Pixels:
    """Apply an EXIF orientation (1 to 8; anything else is upright) to [H, W, C]."""
    if orientation in (5, 6, 7, 8):
        pixels = pixels.transpose(1, 0, 2)
    if orientation in (3, 4, 7, 8):
        pixels = pixels[::-1]
    if orientation in (2, 3, 6, 7):
        pixels = pixels[:, ::-1]
    return pixels


def _decode_with_pillow(content: bytes, max_pixels: int) -> tuple[Pixels, str]:
    try:
        with Image.open(io.BytesIO(content), formats=PILLOW_FORMATS) as image:
            if image.width * image.height > max_pixels:
                raise ImageError("too_many_pixels")
            image.load()  # of an animation: the first frame
            orientation = 1
            try:  # after load(): for TIFF, Pillow turns the pixels itself and drops the tag
                orientation = int(image.getexif().get(0x0112, 1))
            except Exception:
                orientation = 1
            return _upright(_eight_bit(image), orientation), image.format or "unknown"
    except ImageError:
        raise
    except Image.UnidentifiedImageError:
        raise ImageError("unknown_format") from None
    except Image.DecompressionBombError:
        raise ImageError("too_many_pixels") from None
    except Exception:
        raise ImageError("truncated_or_damaged") from None


def _eight_bit(image: Image.Image) -> Pixels:
    """A loaded Pillow image as uint8 [H, W, C] without losing its range."""
    mode = image.mode
    if mode == "F" or not _is_unsigned(image):
        raise ImageError("pixel_range_unknown")
    if mode.startswith("I"):
        return _deep_grey(image)[:, :, None]
    if mode in ("LA", "La", "PA", "RGBA", "RGBa") or "transparency" in image.info:
        rgba = np.asarray(image.convert("RGBA")).astype(np.int32)
        alpha = rgba[:, :, 3:]
        return ((rgba[:, :, :3] * alpha + 255 * (255 - alpha) + 127) // 255).astype(np.uint8)
    if mode in ("L", "1"):
        return np.asarray(image.convert("L"))[:, :, None]
    return np.asarray(image.convert("RGB"))


def _is_unsigned(image: Image.Image) -> bool:
    """Whether a TIFF's numbers are what Pillow takes them for: it reads signed bytes as others."""
    tags = getattr(image, "tag_v2", {}) if image.format == "TIFF" else {}
    formats = tags.get(TIFF_SAMPLE_FORMAT, (TIFF_UNSIGNED,))
    return all(each in (TIFF_UNSIGNED, TIFF_UNDEFINED) for each in formats)


def _deep_grey(image: Image.Image) -> Pixels:
    """Grey of more than 8 bits as uint8 [H, W]; Pillow scales all but TIFF to 16 bits."""
    values = np.asarray(image).astype(np.int64)
    largest, is_white_zero = 0xFFFF, False
    if image.format == "TIFF":
        tags = getattr(image, "tag_v2", {})
        num_bits = tags.get(TIFF_BITS, (16,))[0]
        if num_bits > 16:  # nobody fills 32 bits, and how many are meant is not said
            raise ImageError("pixel_range_unknown")
        largest = 2**num_bits - 1
        is_white_zero = tags.get(TIFF_PHOTOMETRIC) == TIFF_WHITE_IS_ZERO
    if values.min() < 0 or values.max() > largest:
        raise ImageError("pixel_range_unknown")
    scaled = (values * 255 + largest // 2) // largest
    transparent = image.info.get("transparency")
    if is_white_zero:
        scaled = 255 - scaled
    if isinstance(transparent, int):
        scaled[values == transparent] = 255
    return scaled.astype(np.uint8)


def decode_stored(contents: Sequence[bytes]) -> list[Pixels | None]:
    """Decode records that `prepare` wrote: uint8 [H, W, C] each; None for one that does not decode.

    Same result as `decode_image` on each, but one call for many small JPEGs.
    """
    if has_torchvision_jpeg and contents and all(c[:3] == b"\xff\xd8\xff" for c in contents):
        try:
            images = torchvision_decode_jpeg(
                [_as_tensor(content) for content in contents], ImageReadMode.UNCHANGED
            )
        except Exception:
            images = []  # one of them is damaged: find out which, below
        if images and all(image.shape[0] in (1, 3) for image in images):
            return [image.permute(1, 2, 0).numpy() for image in images]
    decoded: list[Pixels | None] = []
    for content in contents:
        try:
            decoded.append(decode_image(content).pixels)
        except ImageError:
            decoded.append(None)
    return decoded


def _as_tensor(content: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)


def _channels_first(pixels: Pixels) -> torch.Tensor:
    return torch.from_numpy(pixels if pixels.flags.writeable else pixels.copy()).permute(2, 0, 1)


def resize_short_side(pixels: Pixels, short_side: int) -> Pixels:
    """Shrink [H, W, C] so that its shorter side is `short_side`; never enlarge.

    Antialiased bicubic, sides rounded to the nearest pixel, channels last (three times as fast).
    """
    height, width = pixels.shape[:2]
    shorter = min(height, width)
    if shorter <= short_side:
        return pixels
    size = [max(1, round(side * short_side / shorter)) for side in (height, width)]
    return _resize(_channels_first(pixels), size).permute(1, 2, 0).numpy()


def _resize(image_CHW: torch.Tensor, size: Sequence[int]) -> torch.Tensor:
    return F.interpolate(image_CHW[None], size=list(size), mode="bicubic", antialias=True)[0]


def encode_jpeg(pixels: Pixels, quality: int = 95) -> bytes:
    """[H, W, C] as JPEG (grey if C = 1). Raises ImageError if a side is too long for JPEG."""
    if max(pixels.shape[:2]) > MAX_JPEG_SIDE:
        raise ImageError("side_too_long")
    if not has_torchvision_jpeg:
        stream = io.BytesIO()
        image = Image.fromarray(pixels[:, :, 0] if pixels.shape[2] == 1 else pixels)
        image.save(stream, "JPEG", quality=quality)
        return stream.getvalue()
    return torchvision_encode_jpeg(_channels_first(pixels).contiguous(), quality).numpy().tobytes()


def random_crop_boxes(
    heights: npt.NDArray[np.int64],
    widths: npt.NDArray[np.int64],
    uniforms: npt.NDArray[np.float64],
    scale: tuple[float, float],
    ratio: tuple[float, float] = (3 / 4, 4 / 3),
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
    """RandomResizedCrop's boxes and flips as a pure function of uniform numbers.

    Up to ten tries of an area and an aspect ratio, the first that fits wins, else the largest
    central crop within the ratio: the distribution of torchvision's RandomResizedCrop.

    Args:
        heights, widths: int [n], sizes of the images.
        uniforms: float64 [n, NUM_CROP_UNIFORMS] in [0, 1).
        scale: smallest and largest share of the area.
        ratio: smallest and largest width over height.

    Returns:
        boxes int [n, 4] (top, left, height, width) and flips bool [n].
    """
    num = len(uniforms)
    heights, widths = heights.astype(np.int64), widths.astype(np.int64)
    tries = uniforms[:, : 2 * NUM_CROP_TRIES].reshape(num, NUM_CROP_TRIES, 2)
    area = (heights * widths)[:, None] * (scale[0] + (scale[1] - scale[0]) * tries[:, :, 0])
    low, high = math.log(ratio[0]), math.log(ratio[1])
    aspect = np.exp(low + (high - low) * tries[:, :, 1])
    crop_w = np.rint(np.sqrt(area * aspect)).astype(np.int64)
    crop_h = np.rint(np.sqrt(area / aspect)).astype(np.int64)
    fits = (crop_w > 0) & (crop_h > 0) & (crop_w <= widths[:, None]) & (crop_h <= heights[:, None])
    first = fits.argmax(1)
    rows = np.arange(num)
    # Where no try fits: the largest central crop whose aspect lies within the ratio.
    fallback_w = np.minimum(widths, np.rint(heights * ratio[1]).astype(np.int64)).clip(1)
    fallback_h = np.minimum(heights, np.rint(widths / ratio[0]).astype(np.int64)).clip(1)
    found = fits[rows, first]
    crop_h = np.where(found, crop_h[rows, first], fallback_h)
    crop_w = np.where(found, crop_w[rows, first], fallback_w)
    place_y, place_x, flip = uniforms[:, -3], uniforms[:, -2], uniforms[:, -1]
    top = np.where(found, np.floor(place_y * (heights - crop_h + 1)), (heights - crop_h) // 2)
    left = np.where(found, np.floor(place_x * (widths - crop_w + 1)), (widths - crop_w) // 2)
    boxes = np.stack([top.astype(np.int64), left.astype(np.int64), crop_h, crop_w], axis=1)
    return boxes, flip < 0.5


def center_boxes(
    heights: npt.NDArray[np.int64], widths: npt.NDArray[np.int64], crop_fraction: float = 1.0
) -> npt.NDArray[np.int64]:
    """Central square boxes int [n, 4] whose side is `crop_fraction` of the shorter side."""
    heights, widths = heights.astype(np.int64), widths.astype(np.int64)
    side = np.rint(np.minimum(heights, widths) * crop_fraction).astype(np.int64).clip(1)
    return np.stack([(heights - side) // 2, (widths - side) // 2, side, side], axis=1)


def crop_and_resize(
    images: npt.NDArray[np.uint8] | Sequence[Pixels],
    boxes: npt.NDArray[np.int64],
    flips: npt.NDArray[np.bool_],
    size: int,
) -> npt.NDArray[np.uint8]:
    """Cut a box out of each image, resize it to a square (antialiased bicubic), flip some.

    Args:
        images: [n, H, W, C] or n arrays [H, W, C], uint8, C in (1, 3).
        boxes: int [n, 4] (top, left, height, width), inside the images.
        flips: bool [n].
        size: side of the result in pixels.

    Returns:
        uint8 [n, 3, size, size].

    Guarantees:
        1. An image's result depends on the image, its box and its flip alone, to the bit: not on
           the others in the call (test_views_by_record_id).
    """
    views = np.empty((len(boxes), 3, size, size), np.uint8)
    groups: dict[tuple[int, ...], list[int]] = {}
    if isinstance(images, np.ndarray):
        groups[images.shape[1:]] = list(range(len(images)))
    else:
        for row, image in enumerate(images):
            groups.setdefault(image.shape, []).append(row)
    for (height, width, _), rows in groups.items():
        if max(height, width, size) <= SMALL_SIDE:
            stacked = images if len(rows) == len(images) else [images[row] for row in rows]
            chosen = slice(None) if len(rows) == len(images) else np.array(rows)
            views[chosen] = _resize_small(np.asarray(stacked), boxes[chosen], flips[chosen], size)
            continue
        for row in rows:
            top, left, box_h, box_w = (int(value) for value in boxes[row])
            box = images[row][top : top + box_h, left : left + box_w]
            view = _resize(_channels_first(np.ascontiguousarray(box)), (size, size)).numpy()
            views[row] = view[:, :, ::-1] if flips[row] else view
    return views


def _resize_small(
    images: npt.NDArray[np.uint8],
    boxes: npt.NDArray[np.int64],
    flips: npt.NDArray[np.bool_],
    size: int,
) -> npt.NDArray[np.uint8]:
    """Many small images [n, H, W, C] of one shape: two products with weight matrices each.

    numpy multiplies stacked matrices one pair at a time, so a row cannot depend on its neighbours.
    """
    num, height, width, _ = images.shape
    images_nCHW = images.transpose(0, 3, 1, 2).astype(np.float32)
    rows_nSH = _axis_weights(height, size)[boxes[:, 0], boxes[:, 2]]
    columns_nSW = _axis_weights(width, size)[boxes[:, 1], boxes[:, 3]]
    columns_nSW[flips] = columns_nSW[flips, ::-1]
    half = np.matmul(rows_nSH[:, None], images_nCHW)
    full = np.matmul(half, columns_nSW[:, None].transpose(0, 1, 3, 2))
    full += 0.5
    np.clip(full, 0.0, 255.0, out=full)
    return np.broadcast_to(full.astype(np.uint8), (num, 3, size, size))


@functools.lru_cache(maxsize=8)
def _axis_weights(length: int, size: int) -> npt.NDArray[np.float32]:
    """float32 [start, extent, size, length]: antialiased bicubic weights of every box on an axis.

    Row o of [start, extent] sums the pixels start..start+extent into output pixel o. Boxes that
    leave the axis have weights 0.
    """
    weights = np.zeros((length, length + 1, size, length), np.float32)
    for extent in range(1, length + 1):
        scale = extent / size
        support = max(scale, 1.0)
        centre = (np.arange(size) + 0.5) * scale
        distance = np.abs((np.arange(extent)[None, :] + 0.5 - centre[:, None]) / support)
        # Keys' cubic with a = -0.5, as Pillow and torch's antialiased bicubic use it.
        near = (1.5 * distance - 2.5) * distance**2 + 1.0
        far = ((-0.5 * distance + 2.5) * distance - 4.0) * distance + 2.0
        kernel = np.where(distance < 1, near, np.where(distance < 2, far, 0.0))
        kernel /= kernel.sum(1, keepdims=True)
        for start in range(length - extent + 1):
            weights[start, extent, :, start : start + extent] = kernel
    return weights


def random_resized_crop_flip(
    image: DecodedImage | Pixels,
    uniforms: npt.NDArray[np.float64],
    size: int,
    scale: tuple[float, float] = (0.2, 1.0),
) -> npt.NDArray[np.uint8]:
    """One image's random view: uint8 [3, size, size] from [NUM_CROP_UNIFORMS] uniforms."""
    pixels = image.pixels if isinstance(image, DecodedImage) else image
    height, width = np.array([pixels.shape[0]]), np.array([pixels.shape[1]])
    boxes, flips = random_crop_boxes(height, width, uniforms[None], scale)
    return crop_and_resize([pixels], boxes, flips, size)[0]


def center_view(
    image: DecodedImage | Pixels, size: int, crop_fraction: float = 1.0
) -> npt.NDArray[np.uint8]:
    """One image's central square view: uint8 [3, size, size]."""
    pixels = image.pixels if isinstance(image, DecodedImage) else image
    boxes = center_boxes(np.array([pixels.shape[0]]), np.array([pixels.shape[1]]), crop_fraction)
    return crop_and_resize([pixels], boxes, np.zeros(1, bool), size)[0]
