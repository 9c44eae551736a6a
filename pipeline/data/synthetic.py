"""Procedural public images: pictures that no person made, for a warm-up that costs no privacy.

Three families, each a pure function of (family, seed, index, size): occluding dead leaves,
iterated-function fractals, and shader-like spectral textures. All are drawn in batches of numpy
arrays, a fixed block of neighbouring indices at a time, so that image i is the same whatever
range it is asked for in.

Source: dead leaves and spectrum images as in arXiv 2106.05963; fractals as in arXiv 2101.08515;
shader images as in arXiv 2211.16412 (the set that ViP, arXiv 2306.08842, warms up on).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]

# Small images are drawn 16 at a time to spread numpy's cost per call; large ones fill a cache.
LARGE_SIDE = 96
SMALL_BLOCK, LARGE_BLOCK = 16, 4

NUM_LEAVES = 28
NUM_LEAF_VALUES = 20
NUM_MAPS = 4
NUM_WALKERS = 128


def generate_image(family: str, seed: int, index: int, size: int) -> npt.NDArray[np.uint8]:
    """One image, uint8 [size, size, 3]; see `generate_batch`."""
    return generate_batch(family, seed, index, 1, size)[0]


def generate_batch(
    family: str, seed: int, start: int, count: int, size: int
) -> npt.NDArray[np.uint8]:
    """Images start..start+count of a family.

    Args:
        family: one of `FAMILIES`.
        seed: any non-negative number; another seed gives unrelated images.
        start: index of the first image, >= 0.
        count: number of images, >= 0.
        size: side in pixels, >= 8.

    Returns:
        uint8 [count, size, size, 3].

    Raises:
        ValueError: unknown family, negative number or size below 8.

    Guarantees:
        1. Image i is the same bits for any start and count that cover it (test_synthetic).
    """
    if family not in FAMILIES:
        raise ValueError(f"family={family!r} is unknown; use one of {', '.join(FAMILIES)}")
    if seed < 0 or start < 0 or count < 0 or size < 8:
        raise ValueError(
            f"seed={seed}, start={start}, count={count} must be >= 0 and size={size} >= 8"
        )
    block = SMALL_BLOCK if size <= LARGE_SIDE else LARGE_BLOCK
    images = np.empty((count, size, size, 3), np.uint8)
    for number in range(start // block, -(-(start + count) // block)):
        first = number * block
        low, high = max(first, start), min(first + block, start + count)
        drawn = FAMILIES[family](_generator(family, seed, number, size), block, size)
        images[low - start : high - start] = drawn[low - first : high - first]
    return images


def _generator(family: str, seed: int, number: int, size: int) -> np.random.Generator:
    name = f"{family}/{seed}/{number}/{size}".encode()
    return np.random.Generator(
        np.random.Philox(key=int.from_bytes(hashlib.sha256(name).digest()[:16], "big"))
    )


def _to_uint8(images: Floats) -> npt.NDArray[np.uint8]:
    """[n, S, S, 3] floats of range 0 to 1 as uint8, clipped."""
    return np.clip(images * 255.0 + 0.5, 0.0, 255.0).astype(np.uint8)


def _grid(size: int) -> tuple[Floats, Floats]:
    """Pixel centres from -1 to 1: y [S, 1] and x [1, S]."""
    line = ((np.arange(size, dtype=np.float32) + 0.5) / size * 2 - 1).astype(np.float32)
    return line[:, None], line[None, :]


def _dead_leaves(rng: np.random.Generator, num: int, size: int) -> npt.NDArray[np.uint8]:
    """Occluding textured shapes with power-law sizes, from back to front.

    The loop over leaves only writes which leaf is in front; colour and texture are then drawn
    once for all pixels. A leaf is a superellipse (from diamond to box) or a wavy blob.
    """
    y, x = _grid(size)
    values = rng.random((num, NUM_LEAVES + 1, NUM_LEAF_VALUES), dtype=np.float32)
    front = np.zeros((num, size, size), np.int32)
    radius = np.clip(0.08 * (1 - values[:, :, 0]) ** (-1 / 1.6), 0.08, 0.9)
    angle = values[:, :, 1] * np.float32(2 * np.pi)
    stretch = np.exp((values[:, :, 2] - 0.5) * 1.8)
    centre = values[:, :, 3:5] * 2.4 - 1.2
    exponent = np.take(np.array([1, 2, 2, 4, 8], np.float32), (values[:, :, 5] * 5).astype(int))
    lobes = np.floor(values[:, :, 6] * 4) + 2
    waviness = np.where(values[:, :, 7] < 0.4, values[:, :, 8] * 0.6, 0.0).astype(np.float32)
    cos, sin = np.cos(angle), np.sin(angle)
    for leaf in range(1, NUM_LEAVES + 1):
        part = (slice(None), leaf, None, None)
        dx, dy = x - centre[:, leaf, 0, None, None], y - centre[:, leaf, 1, None, None]
        u = (cos[part] * dx + sin[part] * dy) * (stretch[part] / radius[part])
        v = (cos[part] * dy - sin[part] * dx) / (stretch[part] * radius[part])
        if (waves := waviness[:, leaf] > 0).any():
            rim = np.arctan2(v[waves], u[waves]) * lobes[waves, leaf, None, None]
            factor = 1 + waviness[waves, leaf, None, None] * np.cos(rim)
            u[waves], v[waves] = u[waves] / factor, v[waves] / factor
        # |u|^p + |v|^p < 1 for p = 1, 2, 4, 8 by squaring; never a general power.
        np.abs(u, out=u)
        np.abs(v, out=v)
        for power in (1, 2, 4):
            more = exponent[:, leaf] > power
            if more.any():
                u[more] *= u[more]
                v[more] *= v[more]
        np.copyto(front, leaf, where=u + v < 1)
    flat = front + (np.arange(num, dtype=np.int32) * (NUM_LEAVES + 1))[:, None, None]
    # From grey (0) to saturated (1), one number per image: photographs are rarely rainbows.
    palette = values[:, :, 9:15].reshape(num, NUM_LEAVES + 1, 2, 3)
    grey = palette.mean(3, keepdims=True)
    palette = grey + (palette - grey) * (1.4 * values[:, 0, 0, None, None, None] ** 0.7)
    colour, other = palette[:, :, 0].reshape(-1, 3), palette[:, :, 1].reshape(-1, 3)
    kind, frequency = values[:, :, 15].reshape(-1), values[:, :, 16].reshape(-1)
    theta = values[:, :, 17].reshape(-1) * np.float32(2 * np.pi)
    rate = np.exp(np.log(2.0) + frequency * np.log(size / 8)).astype(np.float32)
    contrast = np.where(kind < 0.3, 0.12, 0.9 * values[:, :, 18].reshape(-1)).astype(np.float32)
    phase = (np.cos(theta) * rate)[flat] * x + (np.sin(theta) * rate)[flat] * y
    wave = np.sin(phase * np.float32(np.pi) + (values[:, :, 19].reshape(-1) * 6.3)[flat])
    is_sharp = (kind > 0.75)[flat]
    wave = np.where(is_sharp, np.sign(wave), wave)
    blend = (contrast[flat] * (0.5 + 0.5 * wave))[..., None]
    image = colour[flat] * (1 - blend) + other[flat] * blend
    shade = 1 + 0.25 * (x * cos[:, :1, None] + y * sin[:, :1, None])
    grain = rng.standard_normal((num, size, size), dtype=np.float32) * 0.02
    return _to_uint8(image * shade[..., None] + grain[..., None])


def _fractals(rng: np.random.Generator, num: int, size: int) -> npt.NDArray[np.uint8]:
    """Attractors of random iterated function systems, coloured by the maps that led there."""
    maps = _contracting_maps(rng, num)
    det = np.abs(np.linalg.det(maps[:, :, :, :2])) + 0.02
    cumulative = np.cumsum(det / det.sum(1, keepdims=True), axis=1)
    hues = rng.random((num, NUM_MAPS, 3), dtype=np.float32)
    num_kept = max(8, round(size * size * 3 / NUM_WALKERS))
    point = rng.uniform(-1, 1, (num, NUM_WALKERS, 2)).astype(np.float32)
    tint = np.full((num, NUM_WALKERS, 3), 0.5, np.float32)
    points = np.empty((num_kept, num, NUM_WALKERS, 2), np.float32)
    tints = np.empty((num_kept, num, NUM_WALKERS, 3), np.float32)
    base = (np.arange(num) * NUM_MAPS)[:, None]
    flat_maps, flat_hues = maps.reshape(-1, 2, 3), hues.reshape(-1, 3)
    for step in range(-12, num_kept):
        draw = rng.random((num, NUM_WALKERS), dtype=np.float32)
        chosen = base + (draw[:, :, None] > cumulative[:, None, :-1]).sum(2)
        matrix = flat_maps[chosen]
        x, y = point[..., 0].copy(), point[..., 1]
        point[..., 1] = matrix[..., 1, 0] * x + matrix[..., 1, 1] * y + matrix[..., 1, 2]
        point[..., 0] = matrix[..., 0, 0] * x + matrix[..., 0, 1] * y + matrix[..., 0, 2]
        tint += (flat_hues[chosen] - tint) * 0.5
        if step >= 0:
            points[step], tints[step] = point, tint
    # [n, P, 2]: every attractor is centred and scaled into the frame by its own spread.
    placed = points.transpose(1, 0, 2, 3).reshape(num, -1, 2)
    centre = placed.mean(1, keepdims=True)
    spread = placed.std(axis=(1, 2))[:, None, None] + 1e-6
    pixel = ((placed - centre) / (1.9 * spread) + 1) * (size / 2)
    inside = ((pixel >= 0) & (pixel < size)).all(2)
    cell = pixel.clip(0, size - 1).astype(np.int64)
    cell_flat = (np.arange(num)[:, None] * size + cell[..., 1]) * size + cell[..., 0]
    where = cell_flat[inside]
    colours = tints.transpose(1, 0, 2, 3).reshape(num, -1, 3)[inside]
    hits = np.bincount(where, minlength=num * size * size)
    glow = np.stack(
        [np.bincount(where, colours[:, c], minlength=num * size * size) for c in range(3)], axis=1
    )
    colour = (glow / np.maximum(hits, 1)[:, None]).reshape(num, size, size, 3).astype(np.float32)
    density = np.log1p(hits.reshape(num, size, size).astype(np.float32))
    density /= density.max(axis=(1, 2), keepdims=True) + 1e-6
    density = density[..., None] ** 0.45
    y, x = _grid(size)
    back = rng.random((num, 1, 1, 3), dtype=np.float32)
    slope = rng.uniform(-0.3, 0.3, (num, 2, 1, 1, 3)).astype(np.float32)
    back = back + slope[:, 0] * y[None, :, :, None] + slope[:, 1] * x[None, :, :, None]
    return _to_uint8(back * (1 - density) + colour * density)


def _contracting_maps(rng: np.random.Generator, num: int) -> npt.NDArray[np.float32]:
    """float32 [n, NUM_MAPS, 2, 3]: rotation x stretch x rotation (singular values < 1), shift."""
    turn = rng.uniform(0, 2 * np.pi, (2, num, NUM_MAPS))
    singular = np.stack(
        [rng.uniform(0.55, 0.9, (num, NUM_MAPS)), rng.uniform(0.3, 0.75, (num, NUM_MAPS))], axis=-1
    )
    singular *= rng.choice([-1.0, 1.0], (num, NUM_MAPS, 2))

    def rotation(angle: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        return np.stack(
            [np.cos(angle), -np.sin(angle), np.sin(angle), np.cos(angle)], axis=-1
        ).reshape(num, NUM_MAPS, 2, 2)

    linear = rotation(turn[0]) @ (singular[..., None] * rotation(turn[1]))
    shift = rng.uniform(-1, 1, (num, NUM_MAPS, 2, 1))
    return np.concatenate([linear, shift], axis=-1).astype(np.float32)


def _textures(rng: np.random.Generator, num: int, size: int) -> npt.NDArray[np.uint8]:
    """Anisotropic 1/f^a fields, folded through warped waves and a cosine palette, as shaders do."""
    fields = _spectral_fields(rng, num, size)
    y, x = _grid(size)
    a = rng.random((num, 8, 1, 1), dtype=np.float32)
    theta = a[:, 0] * np.float32(2 * np.pi)
    rate = np.exp(a[:, 1] * np.float32(np.log(size / 8)))
    warp = np.where(a[:, 2] < 0.35, 0.0, a[:, 3] * 2.0)
    axis = np.cos(theta) * x + np.sin(theta) * y
    ring = np.sqrt((x - (a[:, 4] * 2 - 1)) ** 2 + (y - (a[:, 5] * 2 - 1)) ** 2)
    axis = np.where(a[:, 6] < 0.3, ring, axis)
    wave = np.sin(axis * rate * np.float32(np.pi) + warp * fields[:, 0])
    is_noise = (a[:, 7] < 0.5).astype(np.float32)
    level = is_noise * fields[:, 0] * 0.5 + (1 - is_noise) * wave
    # Palette: colour = base + amplitude x cos(2 pi (rate x level + phase)), per channel.
    p = rng.random((num, 4, 1, 1, 3), dtype=np.float32)
    angle = (0.15 + 0.6 * p[:, 2]) * level[..., None] + p[:, 3]
    colour = p[:, 0] + (0.15 + 0.5 * p[:, 1]) * np.cos(np.float32(2 * np.pi) * angle)
    light = 0.12 * fields[:, 1] * rng.random((num, 1, 1), dtype=np.float32)
    return _to_uint8(colour + light[..., None])


def _spectral_fields(rng: np.random.Generator, num: int, size: int) -> Floats:
    """float32 [n, 2, S, S], zero mean and unit variance, power falling as 1/f^2a along an axis."""
    fy = np.fft.fftfreq(size)[:, None].astype(np.float32)
    fx = np.fft.rfftfreq(size)[None, :].astype(np.float32)
    a = rng.random((num, 2, 3, 1, 1), dtype=np.float32)
    theta, stretch = a[:, :, 0] * np.float32(np.pi), np.exp((a[:, :, 1] - 0.5) * 2)
    u, v = np.cos(theta) * fx + np.sin(theta) * fy, np.cos(theta) * fy - np.sin(theta) * fx
    power = stretch * u * u + v * v / stretch
    power[:, :, 0, 0] = 1.0
    amplitude = np.exp(-(0.4 + 0.9 * a[:, :, 2]) * np.log(power))  # |f|^-2a, a from 0.4 to 1.3
    amplitude[:, :, 0, 0] = 0.0
    turn = rng.random(power.shape, dtype=np.float32) * np.float32(2 * np.pi)
    spectrum = amplitude * (np.cos(turn) + 1j * np.sin(turn))
    fields = np.fft.irfft2(spectrum, s=(size, size)).astype(np.float32)
    return fields / (fields.std(axis=(2, 3), keepdims=True) + 1e-12)


FAMILIES: dict[str, Callable[[np.random.Generator, int, int], npt.NDArray[np.uint8]]] = {
    "dead_leaves": _dead_leaves,
    "fractals": _fractals,
    "textures": _textures,
}
