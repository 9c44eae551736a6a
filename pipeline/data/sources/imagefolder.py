"""Folders of image files."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pipeline.data.sources.base import (
    IMAGE_SUFFIXES,
    RawRecord,
    Source,
    SourceUnit,
    fault_units,
    faulty_records,
    list_below,
    printable,
    require_folder,
    suffix_of,
    told,
)
from pipeline.data.sources.groups import NO_RULES, RowRules
from pipeline.data.sources.metadata import read_metadata
from pipeline.storage import Location

FILES_PER_UNIT = 256


class ImageFolderSource(Source):
    """A folder of image files; the label of a file is the relative folder it lies in.

    Whole relative folders are classes, so that `a/x` and `b/x` stay apart. Files at the top have
    no label; if all files lie at the top there are no classes.

    Where there is a `metadata.csv`, `.jsonl` or `.parquet` with a column `file_name` (relative to
    it), folders are no classes, as in Hugging Face's imagefolder: labels are the column `label`,
    integers or names; `rules` read the other columns. An image without a row has no label.
    """

    def __init__(self, path: str, rules: RowRules = NO_RULES) -> None:
        self.root = Location(path)
        require_folder(self.root, "imagefolder")
        listing = list_below(self.root)
        self._faults = list(listing.faults)
        self._groups: dict[str, str] = {}
        self._files = [(n, size) for n, size in listing.files if suffix_of(n) in IMAGE_SUFFIXES]
        if not self._files:
            raise ValueError(
                f"source=imagefolder:{self.root} holds no image file: files must end in one of"
                f" {', '.join(IMAGE_SUFFIXES)} (any case)" + told(listing.faults)
            )
        rows = read_metadata(self.root, [name for name, _ in listing.files])
        if rows is None:
            if rules:
                raise ValueError(
                    f"{rules.text}: source=imagefolder:{self.root} has no metadata to read; put a"
                    " metadata.csv, .jsonl or .parquet with file_name there"
                )
            folders = sorted({_folder(name) for name, _ in self._files} - {""})
            numbers = {folder: number for number, folder in enumerate(folders)}
            self.class_names = tuple(printable(folder) for folder in folders) or None
            self._labels = {name: numbers.get(_folder(name)) for name, _ in self._files}
            return
        if rules:
            columns = {column for row in rows.values() for column in row}
            rules.require(columns, f"the metadata of source=imagefolder:{self.root}")
            judged = {name: rules.judge(rows.get(name, {})) for name, _ in self._files}
            self._faults += sorted((name, why) for name, (why, _) in judged.items() if why)
            self._files = [each for each in self._files if judged[each[0]][0] is None]
            self._groups = {name: group for name, (_, group) in judged.items() if group}
        given = {name: row.get("label") for name, row in rows.items()}
        named = sorted({label for label in given.values() if isinstance(label, str)})
        self.class_names = tuple(named) or None
        places: dict[object, int] = {label: place for place, label in enumerate(named)}
        if not named:
            places = {each: each for each in given.values() if type(each) is int}
        self._labels = {name: places.get(label) for name, label in given.items()}

    def list_units(self) -> list[SourceUnit]:
        units: list[SourceUnit] = []
        for start in range(0, len(self._files), FILES_PER_UNIT):
            files = self._files[start : start + FILES_PER_UNIT]
            units.append(
                SourceUnit(
                    index=len(units),
                    name=f"files {start}",
                    items=tuple((name, self._labels.get(name)) for name, _ in files),
                    groups=tuple(self._groups[name] for name, _ in files if self._groups),
                    num_bytes=sum(size for _, size in files),
                )
            )
        return units + fault_units(self._faults, len(units))

    def read_unit(self, unit: SourceUnit) -> Iterator[RawRecord]:
        groups = unit.groups or (None,) * len(unit.items)
        for (name, label), group in zip(unit.items, groups, strict=True):
            key = printable(name)
            try:
                content = (self.root / name).read_bytes()
            except OSError:
                yield RawRecord(key=key, content=None, label=label, error="unreadable_file")
                continue
            yield RawRecord(key=key, content=content, label=label, group=group)
        yield from faulty_records(unit)

    def __getstate__(self) -> dict[str, Any]:
        # A worker reads units; the list of all files stays with whoever listed them.
        kept = {"root": self.root, "class_names": self.class_names}
        return {**kept, "_files": [], "_labels": {}, "_groups": {}}


def _folder(name: str) -> str:
    return name.rpartition("/")[0]
