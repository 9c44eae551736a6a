"""Keyed Gaussian noise in float64, addressed by absolute coordinate."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

from pipeline.privacy.keys import checked_key, derive

CHUNK = 65_536
_PAIRS = CHUNK // 2
_CHUNK_BYTES = CHUNK * 8
_ZEROS = bytes(_CHUNK_BYTES)

_LOW_BITS = np.uint64(2**11 - 1)
_ANGLE_SHIFT = np.uint64(11)


@dataclass(frozen=True, kw_only=True)
class KeyedNoise:
    """Standard normals as a pure function of (noise sub-key, step, absolute coordinate).

    Coordinates are those of the flat parameter vector. Chunk c holds coordinates
    [65,536 c, 65,536 (c+1)); its bits are AES-256-CTR with a key derived from (noise sub-key,
    step) and counter blocks starting at c 2^64. Box-Muller makes two values of two words.

    Args:
        noise_key: 32 bytes, `AttemptKey.noise_key()`.

    Guarantees:
        1. The value of a coordinate does not depend on how the vector is cut into slices, on
           the rank or on the number of ranks (test_noise_by_absolute_coordinate).
        2. Steps, chunks and keys give independent streams: AES-256 in counter mode is a
           pseudo-random function here, at most 2^40 blocks a key, so its distinguishing
           advantage is below 2^-49 a step (test_noise_streams_are_independent).
        3. Mean 0 and standard deviation 1 per chunk (test_noise_std_per_chunk).
        4. Uniforms of the radius have 75 bits and those of the angle 53: |z| reaches 10.26,
           and the normal mass beyond is 1e-24 a coordinate, 6e-13 for 1e8 coordinates and
           6,000 steps (test_extreme_words_give_finite_values).
    """

    noise_key: bytes = field(repr=False)

    def __post_init__(self) -> None:
        checked_key("noise_key", self.noise_key)

    def gaussian(
        self, step: int, start: int, stop: int, out: np.ndarray | None = None
    ) -> np.ndarray:
        """Returns the normals of coordinates [start, stop) at `step`.

        Args:
            step: logical step, >= 0.
            start: first coordinate, >= 0.
            stop: one past the last coordinate, >= start.
            out: float64 [stop - start], contiguous, to fill instead of a new array; reusing
                one saves the page faults of a fresh one, about as much time as the noise.

        Returns:
            float64 [stop - start].
        """
        if step < 0 or start < 0 or stop < start:
            raise ValueError(
                f"step, start, stop = {step}, {start}, {stop}: allowed are step >= 0 and "
                "0 <= start <= stop; pass absolute coordinates of the flat parameter vector"
            )
        if out is None:
            out = np.empty(stop - start, dtype=np.float64)
        elif out.shape != (stop - start,) or out.dtype != np.float64 or not out.flags.c_contiguous:
            raise ValueError(
                f"out has shape {out.shape}, dtype {out.dtype}: allowed is a contiguous float64 "
                f"array of shape ({stop - start},)"
            )
        aes_key = algorithms.AES(derive(self.noise_key, b"step", step))
        scratch = _Scratch()
        for chunk in range(start // CHUNK, -(-stop // CHUNK)):
            offset = chunk * CHUNK
            first, last = max(start, offset), min(stop, offset + CHUNK)
            if last - first == CHUNK:
                scratch.fill(aes_key, chunk, out[first - start : last - start])
            else:
                scratch.fill(aes_key, chunk, scratch.values)
                out[first - start : last - start] = scratch.values[first - offset : last - offset]
        return out


class _Scratch:
    """The buffers in which one chunk is made; reused so that they stay in cache."""

    def __init__(self) -> None:
        # CTR never buffers, but update_into asks for one block of room.
        self.bytes = bytearray(_CHUNK_BYTES + 15)
        self.words = np.frombuffer(self.bytes, dtype="<u8", count=CHUNK)
        self.values = np.empty(CHUNK, dtype=np.float64)
        self.a = np.empty(_PAIRS, dtype=np.float64)
        self.b = np.empty(_PAIRS, dtype=np.float64)
        self.bits = np.empty(_PAIRS, dtype=np.uint64)

    def fill(self, aes_key: algorithms.AES, chunk: int, values: np.ndarray) -> None:
        """Writes the CHUNK normals of `chunk` into `values` (float64 [CHUNK])."""
        counter = (chunk << 64).to_bytes(16, "big")
        Cipher(aes_key, modes.CTR(counter)).encryptor().update_into(_ZEROS, self.bytes)
        self.box_muller(values)

    def box_muller(self, values: np.ndarray) -> None:
        """Turns the CHUNK words in the buffer into as many normals in `values`."""
        radius_words, angle_words = self.words[:_PAIRS], self.words[_PAIRS:]
        a, b, bits = self.a, self.b, self.bits

        # a = u in (0, 1]: 64 bits, and the 11 bits the angle leaves over below them.
        np.bitwise_and(angle_words, _LOW_BITS, out=bits)
        np.copyto(b, bits, casting="unsafe")
        b *= 2.0**-11
        b += 2.0**-12
        np.copyto(a, radius_words, casting="unsafe")
        a += b
        a *= 2.0**-64
        # a = radius = sqrt(-2 log u)
        np.log(a, out=a)
        a *= -2.0
        np.sqrt(a, out=a)
        # b = t = tan(angle / 2), angle uniform in [-pi, pi): one tan gives cosine and sine,
        # (1 - t^2) / (1 + t^2) and 2 t / (1 + t^2), and costs less than either.
        np.right_shift(angle_words, _ANGLE_SHIFT, out=bits)
        np.copyto(b, bits, casting="unsafe")
        b *= math.pi * 2.0**-53
        b -= math.pi / 2
        np.tan(b, out=b)
        cosine, sine = values[:_PAIRS], values[_PAIRS:]
        np.multiply(b, b, out=sine)
        np.subtract(1.0, sine, out=cosine)
        sine += 1.0
        np.divide(a, sine, out=a)
        cosine *= a
        b *= 2.0
        np.multiply(a, b, out=sine)
