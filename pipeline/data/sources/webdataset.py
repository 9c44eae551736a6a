"""Tars of samples: WebDataset, and what img2dataset writes."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from typing import Any

from pipeline.data.sources.base import (
    GZIP,
    IMAGE_SUFFIXES,
    Listing,
    RawRecord,
    Source,
    SourceUnit,
    fault_units,
    faulty_records,
    list_below,
    printable,
    require_folder,
    require_path,
    suffix_of,
    told,
)
from pipeline.data.sources.groups import NO_RULES, RowRules
from pipeline.data.sources.where import lowered
from pipeline.data.tars import TarMember, read_tar_members
from pipeline.storage import Location


class WebDatasetSource(Source):
    """A tar, or a folder of tars, read member by member and never extracted.

    A sample is a run of members with one key (the name up to the first dot of its base name).
    Its picture is the first member whose suffix names an image, plain suffixes (`jpg`) before
    compound ones (`seg.png`); its label is in `.cls`, or under "label" in `.json`. `rules` read
    the `.json`, which is where img2dataset writes width, height and what LAION says of an image;
    downloads that failed are in its Parquet files alone, which are not read.
    Source: the WebDataset and img2dataset conventions.
    """

    def __init__(self, path: str, rules: RowRules = NO_RULES) -> None:
        self.root, self.rules = Location(path), rules
        require_path(self.root, "webdataset")
        if suffix_of(self.root.name) in ("tar", "tgz") or self.root.name.lower().endswith(
            ".tar.gz"
        ):
            size = self.root.num_bytes()
            self.root, name = Location(self.root.uri.rpartition("/")[0]), self.root.name
            self._listing = Listing(files=[(name, size)], faults=[])
        else:
            require_folder(self.root, "webdataset")
            self._listing = list_below(self.root)
        self._tars = [
            (name, size)
            for name, size in self._listing.files
            if name.lower().endswith((".tar", ".tar.gz", ".tgz"))
        ]
        if not self._tars:
            raise ValueError(
                f"source=webdataset:{self.root} holds no tar: files must end in .tar, .tar.gz or"
                " .tgz" + told(self._listing.faults)
            )
        if rules:
            rules.require(self._first_metadata(), f"the first image's .json of {self.root}")

    def _first_metadata(self) -> dict[str, Any]:
        """Of the first sample that has some; every column must be known there."""
        with (self.root / self._tars[0][0]).open_stream() as start:
            is_gzip = start.read(2) == GZIP
        place = self.root / self._tars[0][0]
        with place.open_stream(compression="gzip" if is_gzip else None) as stream:
            for sample in itertools.islice(_samples(read_tar_members(stream)), 100):
                members = {_split_name(each.name)[1]: each for each in sample}
                if found := _metadata(members):
                    return found
        return {}

    def list_units(self) -> list[SourceUnit]:
        units = [
            SourceUnit(index=i, name=name, num_bytes=size)
            for i, (name, size) in enumerate(self._tars)
        ]
        return units + fault_units(self._listing.faults, len(units))

    def read_unit(self, unit: SourceUnit) -> Iterator[RawRecord]:
        if unit.faults:
            yield from faulty_records(unit)
            return
        tar = printable(unit.name)
        try:
            place = self.root / unit.name
            with place.open_stream() as start:  # what a tar is called does not tell
                is_gzip = start.read(2) == GZIP
            stream = place.open_stream(compression="gzip" if is_gzip else None)
        except OSError:
            yield RawRecord(key=tar, content=None, error="unreadable_file")
            return
        with stream:
            for number, sample in enumerate(_samples(read_tar_members(stream))):
                yield _record_of_sample(f"{tar}/{number}", sample, self.rules)

    def __getstate__(self) -> dict[str, Any]:
        return {
            "root": self.root,
            "rules": self.rules,
            "class_names": self.class_names,
            "_tars": [],
        }


def _split_name(name: str) -> tuple[str, str]:
    """(key, suffix): the name up to its base name's first dot, and the rest in lower case."""
    folder, slash, base = name.rpartition("/")
    stem, _, suffix = base.partition(".")
    return folder + slash + stem, suffix.lower()


def _samples(members: Iterator[TarMember]) -> Iterator[list[TarMember]]:
    """Runs of members that share a key; a fault without a name is a run of its own."""
    sample: list[TarMember] = []
    for member in members:
        is_same = bool(
            sample and member.name and _split_name(member.name)[0] == _split_name(sample[0].name)[0]
        )
        if sample and not is_same:
            yield sample
            sample = []
        sample.append(member)
    if sample:
        yield sample


def _record_of_sample(position: str, sample: list[TarMember], rules: RowRules) -> RawRecord:
    key = f"{position}:{_split_name(sample[0].name)[0]}"
    by_suffix: dict[str, TarMember] = {}
    for member in sample:
        by_suffix.setdefault(_split_name(member.name)[1], member)
    images = [suffix for suffix in IMAGE_SUFFIXES if suffix in by_suffix]
    images += [s for s in by_suffix if "." in s and s.rpartition(".")[2] in IMAGE_SUFFIXES]
    faults = [member.error for member in sample if member.error]
    if not images:
        return RawRecord(key=key, content=None, error=faults[0] if faults else "no_image")
    image = by_suffix[images[0]]
    if image.content is None:
        return RawRecord(key=key, content=None, error=image.error)
    why, group = rules.judge(lowered(_metadata(by_suffix))) if rules else (None, None)
    if why is not None:
        return RawRecord(key=key, content=None, error=why)
    label = _label_of_sample(by_suffix)
    return RawRecord(key=key, content=image.content, label=label, group=group)


def _label_of_sample(by_suffix: dict[str, TarMember]) -> int | None:
    try:
        if "cls" in by_suffix and by_suffix["cls"].content is not None:
            return int(by_suffix["cls"].content.strip())
        label = _metadata(by_suffix).get("label")
        return label if isinstance(label, int) and not isinstance(label, bool) else None
    except ValueError:
        return None


def _metadata(by_suffix: dict[str, TarMember]) -> dict[str, Any]:
    """What the sample's `.json` says; nothing where there is none that can be read."""
    if "json" not in by_suffix or by_suffix["json"].content is None:
        return {}
    try:
        found = json.loads(by_suffix["json"].content)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
