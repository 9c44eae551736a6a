"""Canaries' pictures: a record's number in black and white cells, in a real prepared data set.

So what the model is given can be read off the pixels, whatever anybody says was delivered. Cells of
four by four pixels, black or white, survive any JPEG.
"""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from pipeline.data.prepare import PrepareConfig, prepare
from pipeline.storage import Location

_CELLS_PER_SIDE, _CELL = 4, 4
SIDE = _CELLS_PER_SIDE * _CELL
MAX_PICTURES = 2 ** (_CELLS_PER_SIDE**2)
_kept: list[tempfile.TemporaryDirectory[str]] = []


@functools.cache
def canary_store(num_canaries: int) -> str:
    """The folder of a prepared public data set whose record i shows the number i.

    It is made once a process, and gone when the process ends.

    Args:
        num_canaries: in [1, MAX_PICTURES].

    Raises:
        ValueError: too many canaries, or none.

    Guarantees:
        1. Record i of the store, read through the stream, shows i
           (test_pictures_show_their_record).
    """
    if not 1 <= num_canaries <= MAX_PICTURES:
        raise ValueError(f"num_canaries={num_canaries} must lie in [1, {MAX_PICTURES}]")
    folder = tempfile.TemporaryDirectory(prefix="dp-pretrain-canaries-")
    _kept.append(folder)
    source = Path(folder.name) / "canaries-images-idx3-ubyte"
    bits_NB = np.arange(num_canaries)[:, None] >> np.arange(_CELLS_PER_SIDE**2) & 1
    cells = bits_NB.reshape(num_canaries, _CELLS_PER_SIDE, _CELLS_PER_SIDE)
    pixels = 255 * np.kron(cells, np.ones((1, _CELL, _CELL), np.int64))
    header = bytes([0, 0, 8, 3]) + np.array(pixels.shape, ">u4").tobytes()
    source.write_bytes(header + pixels.astype(np.uint8).tobytes())
    root = Location(folder.name) / "prepared"
    config = PrepareConfig(
        name="canaries", source=f"idx:{source}", visibility="public", image_short_side=SIDE
    )
    prepare(config, root, num_workers=1)
    return str(root)


def numbers_of(images_M3HW: Tensor, threshold: float) -> Tensor:
    """The number that each picture shows, int64 [M]; black is below the threshold."""
    cells = images_M3HW.float().mean(1)
    cells = cells.unflatten(2, (_CELLS_PER_SIDE, _CELL)).unflatten(1, (_CELLS_PER_SIDE, _CELL))
    bits_MB = (cells.mean((2, 4)) > threshold).flatten(1).long()
    return (bits_MB << torch.arange(bits_MB.shape[1], device=bits_MB.device)).sum(1)
