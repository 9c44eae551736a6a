"""Synthetic images as a source."""

from __future__ import annotations

import re
import urllib.parse
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from pipeline.data.sources.base import RawRecord, Source, SourceUnit
from pipeline.data.synthetic import FAMILIES, generate_batch

SYNTHETIC_PER_UNIT = 1_024
SYNTHETIC_LARGE_SIDE = 128


class SyntheticSource(Source):
    """Procedural images: `FAMILY+FAMILY?num_images=N&size=S&seed=K`, families taken in turn."""

    def __init__(self, spec: str) -> None:
        names, _, query = spec.partition("?")
        self.families = tuple(names.split("+"))
        unknown = [name for name in self.families if name not in FAMILIES]
        if unknown:
            raise ValueError(
                f"source=synthetic:{spec}: family {unknown[0]!r} is unknown; use one or more of"
                f" {'+'.join(FAMILIES)}"
            )
        given = dict(urllib.parse.parse_qsl(query, keep_blank_values=True))
        numbers = {"num_images": None, "size": None, "seed": 0}
        for field, value in given.items():
            if field not in numbers or not re.fullmatch(r"\d+", value):
                raise ValueError(
                    f"source=synthetic:{spec}: {field}={value!r} is not understood; write"
                    " ?num_images=N&size=S&seed=K with whole numbers"
                )
        merged = {**numbers, **{field: int(value) for field, value in given.items()}}
        if not merged["num_images"] or not merged["size"] or not 8 <= merged["size"] <= 4096:
            raise ValueError(
                f"source=synthetic:{spec}: num_images={merged['num_images']} and"
                f" size={merged['size']} must be given, num_images >= 1 and 8 <= size <= 4096"
            )
        self.num_images, self.size = merged["num_images"], merged["size"]
        self.seed = merged["seed"] or 0

    def list_units(self) -> list[SourceUnit]:
        per_unit = SYNTHETIC_PER_UNIT if self.size <= SYNTHETIC_LARGE_SIDE else 64
        return [
            SourceUnit(index=i, name="synthetic", start=s, stop=min(self.num_images, s + per_unit))
            for i, s in enumerate(range(0, self.num_images, per_unit))
        ]

    def read_unit(self, unit: SourceUnit) -> Iterator[RawRecord]:
        num_families = len(self.families)
        batches: dict[str, tuple[int, npt.NDArray[np.uint8]]] = {}
        for index in range(unit.start, unit.stop):
            family, number = self.families[index % num_families], index // num_families
            start, batch = batches.get(family, (0, np.empty((0,), np.uint8)))
            if not start <= number < start + len(batch):
                last = (unit.stop - 1 - index) // num_families + 1
                start, batch = (
                    number,
                    generate_batch(family, self.seed, number, min(64, last), self.size),
                )
                batches[family] = (start, batch)
            yield RawRecord(key=f"{family}/{self.seed}/{number}", content=batch[number - start])
