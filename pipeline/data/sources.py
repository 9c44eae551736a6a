"""What people bring: folders of images, tars, IDX files and procedural images, read as one stream.

A source lists *units* (a tar, some files, a range of rows): small, picklable and read on their own
by any worker. Reading never fails because of content: an unreadable file, a damaged tar member or
a cut-off tar becomes a RawRecord with an `error`, which `prepare` counts. Only a path that does
not hold what its URI says is a ValueError.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
import os
import re
import stat
import urllib.parse
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from pyarrow import fs

from pipeline.data.synthetic import FAMILIES, generate_batch
from pipeline.data.tars import TarMember, read_tar_members
from pipeline.storage import Location

IMAGE_SUFFIXES = (
    *("jpg", "jpeg", "png", "webp", "ppm", "pgm", "bmp", "tif", "tiff"),
    *("gif", "avif", "jp2"),
)
FILES_PER_UNIT = 256
ROWS_PER_UNIT = 5_000
SYNTHETIC_PER_UNIT = 1_024
_GZIP = b"\x1f\x8b"


@dataclass(frozen=True, kw_only=True)
class RawRecord:
    """One picture as found: encoded bytes or uint8 pixels, or the reason why there is neither."""

    key: str
    content: bytes | npt.NDArray[np.uint8] | None
    label: int | None = None
    error: str | None = None


@dataclass(frozen=True, kw_only=True)
class SourceUnit:
    """A part of a source that is read as a whole: its place in the order and what to read."""

    index: int
    name: str
    items: tuple[tuple[str, int | None], ...] = ()
    start: int = 0
    stop: int = 0
    faults: tuple[tuple[str, str], ...] = ()
    """(name, error) of what the listing already knows cannot be read."""
    num_bytes: int = 0
    """Size of all files behind it, so that a change of them shows."""

    def fingerprint(self) -> str:
        """Text that changes when the unit means other records."""
        return json.dumps(
            [self.name, self.items, self.start, self.stop, self.faults, self.num_bytes]
        )


class Source(ABC):
    """An ordered collection of records in independently readable units."""

    class_names: tuple[str, ...] | None = None

    @abstractmethod
    def list_units(self) -> list[SourceUnit]:
        """All units, in the order that decides record ids. Raises ValueError if there are none."""

    @abstractmethod
    def read_unit(self, unit: SourceUnit) -> Iterator[RawRecord]:
        """The unit's records in order; content faults are records with `error`."""

    def listing_digest(self) -> str:
        """SHA-256 (hex) of the names and sizes of all files: differs where the source changed."""
        digest = hashlib.sha256()
        for unit in self.list_units():
            digest.update(unit.fingerprint().encode() + b"\n")
        return digest.hexdigest()


def open_source(uri: str) -> Source:
    """The source that a URI names.

    Args:
        uri: one of `imagefolder:PATH` (class = relative folder), `webdataset:PATH` (a tar or a
            folder of tars, img2dataset's too), `idx:IMAGES[,LABELS]` (MNIST family, plain or
            .gz), `synthetic:FAMILY+FAMILY?num_images=N&size=S&seed=K`. PATH is local or any URI
            that pyarrow reads (`s3://bucket/folder`).

    Raises:
        ValueError: unknown kind, missing path, or nothing of that kind there.
    """
    kind, separator, rest = uri.partition(":")
    kinds: dict[str, Callable[[str], Source]] = {
        "imagefolder": ImageFolderSource,
        "webdataset": WebDatasetSource,
        "idx": IdxSource,
        "synthetic": SyntheticSource,
    }
    if not separator or kind not in kinds or not rest:
        raise ValueError(
            f"source={uri!r} is not understood: write KIND:WHERE with KIND one of"
            f" {', '.join(kinds)}, for example imagefolder:/my/photos"
        )
    return kinds[kind](rest)


def _suffix(name: str) -> str:
    return name.rpartition("/")[2].rpartition(".")[2].lower()


@dataclass(frozen=True, kw_only=True)
class _Listing:
    """What lies below a folder, sorted: (relative path, size) of files, (path, error) of others."""

    files: list[tuple[str, int]]
    faults: list[tuple[str, str]]


def _list_below(root: Location) -> _Listing:
    """All visible files below a folder.

    A link to a file counts as the file. A link to a folder is not followed, since it may lead back
    to where it lies: it is a fault, and so is a folder that may not be listed.
    """
    if not root.is_local:
        filesystem, path = root.filesystem()
        infos = filesystem.get_file_info(fs.FileSelector(path, recursive=True))
        named = [(info.path[len(path) :].lstrip("/"), info) for info in infos]
        files = [(name, info.size or 0) for name, info in named if info.type == fs.FileType.File]
        is_hidden = re.compile(r"(^|/)\.").search
        return _Listing(files=sorted(f for f in files if not is_hidden(f[0])), faults=[])
    listing = _Listing(files=[], faults=[])
    waiting = [""]
    while waiting:
        folder = waiting.pop()
        try:
            entries = list(os.scandir(root.local_path / folder))
        except OSError:
            listing.faults.append((folder, "unreadable_folder"))
            continue
        for entry in entries:
            name = f"{folder}/{entry.name}" if folder else entry.name
            if entry.name.startswith("."):
                continue
            if entry.is_dir(follow_symlinks=False):
                waiting.append(name)
                continue
            try:
                kind = entry.stat().st_mode
            except OSError:  # a broken link, or one to itself
                listing.faults.append((name, "broken_link"))
                continue
            if stat.S_ISDIR(kind):
                listing.faults.append((name, "linked_folder"))
            elif stat.S_ISREG(kind):
                listing.files.append((name, entry.stat().st_size))
            else:  # reading a pipe or a device may never end
                listing.faults.append((name, "not_a_file"))
    listing.files.sort()
    listing.faults.sort()
    return listing


def _fault_units(listing: _Listing, index: int) -> list[SourceUnit]:
    """The listing's faults as the last unit; none where there are none."""
    if not listing.faults:
        return []
    return [SourceUnit(index=index, name="not readable", faults=tuple(listing.faults))]


def _faulty_records(unit: SourceUnit) -> Iterator[RawRecord]:
    for name, error in unit.faults:
        yield RawRecord(key=name, content=None, error=error)


def _printable(name: str) -> str:
    """A file name as text that UTF-8 can hold: bytes that are no UTF-8 become \\xNN."""
    return os.fsencode(name).decode("utf-8", "backslashreplace")


def _require_folder(root: Location, kind: str) -> None:
    _require_path(root, kind)
    if root.is_local and not root.local_path.is_dir():
        raise ValueError(f"source={kind}:{root} is a file: give the folder that holds the files")


def _require_path(root: Location, kind: str) -> None:
    if not root.exists():
        raise ValueError(f"source={kind}:{root} does not exist: check the path and its spelling")


class ImageFolderSource(Source):
    """A folder of image files; the label of a file is the relative folder it lies in.

    Whole relative folders are classes, so that `a/x` and `b/x` stay apart. Files at the top have
    no label; if all files lie at the top there are no classes.
    """

    def __init__(self, path: str) -> None:
        self.root = Location(path)
        _require_folder(self.root, "imagefolder")
        self._listing = _list_below(self.root)
        self._files = [(n, size) for n, size in self._listing.files if _suffix(n) in IMAGE_SUFFIXES]
        if not self._files:
            raise ValueError(
                f"source=imagefolder:{self.root} holds no image file: files must end in one of"
                f" {', '.join(IMAGE_SUFFIXES)} (any case)" + _told(self._listing.faults)
            )
        folders = sorted({_folder(name) for name, _ in self._files} - {""})
        self.class_names = tuple(_printable(folder) for folder in folders) or None
        self._numbers = {folder: number for number, folder in enumerate(folders)}

    def list_units(self) -> list[SourceUnit]:
        units: list[SourceUnit] = []
        for start in range(0, len(self._files), FILES_PER_UNIT):
            files = self._files[start : start + FILES_PER_UNIT]
            units.append(
                SourceUnit(
                    index=len(units),
                    name=f"files {start}",
                    items=tuple((name, self._numbers.get(_folder(name))) for name, _ in files),
                    num_bytes=sum(size for _, size in files),
                )
            )
        return units + _fault_units(self._listing, len(units))

    def read_unit(self, unit: SourceUnit) -> Iterator[RawRecord]:
        for name, label in unit.items:
            key = _printable(name)
            try:
                content = (self.root / name).read_bytes()
            except OSError:
                yield RawRecord(key=key, content=None, label=label, error="unreadable_file")
                continue
            yield RawRecord(key=key, content=content, label=label)
        yield from _faulty_records(unit)

    def __getstate__(self) -> dict[str, Any]:
        # A worker reads units; the list of all files stays with whoever listed them.
        return {"root": self.root, "class_names": self.class_names, "_files": []}


def _folder(name: str) -> str:
    return name.rpartition("/")[0]


def _told(faults: list[tuple[str, str]]) -> str:
    """The first of the listing's faults, in words, for an error."""
    if not faults:
        return ""
    name, error = faults[0]
    return f"; left out {len(faults)}, the first {_printable(name) or 'the folder'!r} ({error})"


class WebDatasetSource(Source):
    """A tar, or a folder of tars, read member by member and never extracted.

    A sample is a run of members with one key (the name up to the first dot of its base name).
    Its picture is the first member whose suffix names an image, plain suffixes (`jpg`) before
    compound ones (`seg.png`); its label is in `.cls`, or under "label" in `.json`.
    Source: the WebDataset and img2dataset conventions.
    """

    def __init__(self, path: str) -> None:
        self.root = Location(path)
        _require_path(self.root, "webdataset")
        if _suffix(self.root.name) in ("tar", "tgz") or self.root.name.lower().endswith(".tar.gz"):
            size = self.root.num_bytes()
            self.root, name = Location(self.root.uri.rpartition("/")[0]), self.root.name
            self._listing = _Listing(files=[(name, size)], faults=[])
        else:
            _require_folder(self.root, "webdataset")
            self._listing = _list_below(self.root)
        self._tars = [
            (name, size)
            for name, size in self._listing.files
            if name.lower().endswith((".tar", ".tar.gz", ".tgz"))
        ]
        if not self._tars:
            raise ValueError(
                f"source=webdataset:{self.root} holds no tar: files must end in .tar, .tar.gz or"
                " .tgz" + _told(self._listing.faults)
            )

    def list_units(self) -> list[SourceUnit]:
        units = [
            SourceUnit(index=i, name=name, num_bytes=size)
            for i, (name, size) in enumerate(self._tars)
        ]
        return units + _fault_units(self._listing, len(units))

    def read_unit(self, unit: SourceUnit) -> Iterator[RawRecord]:
        if unit.faults:
            yield from _faulty_records(unit)
            return
        tar = _printable(unit.name)
        try:
            place = self.root / unit.name
            with place.open_stream() as start:  # what a tar is called does not tell
                is_gzip = start.read(2) == _GZIP
            stream = place.open_stream(compression="gzip" if is_gzip else None)
        except OSError:
            yield RawRecord(key=tar, content=None, error="unreadable_file")
            return
        with stream:
            for number, sample in enumerate(_samples(read_tar_members(stream))):
                yield _record_of_sample(f"{tar}/{number}", sample)

    def __getstate__(self) -> dict[str, Any]:
        return {"root": self.root, "class_names": self.class_names, "_tars": []}


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


def _record_of_sample(position: str, sample: list[TarMember]) -> RawRecord:
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
    return RawRecord(key=key, content=image.content, label=_label_of_sample(by_suffix))


def _label_of_sample(by_suffix: dict[str, TarMember]) -> int | None:
    try:
        if "cls" in by_suffix and by_suffix["cls"].content is not None:
            return int(by_suffix["cls"].content.strip())
        if "json" in by_suffix and by_suffix["json"].content is not None:
            label = json.loads(by_suffix["json"].content).get("label")
            return label if isinstance(label, int) and not isinstance(label, bool) else None
    except (ValueError, AttributeError, RecursionError):
        return None
    return None


class IdxSource(Source):
    """IDX files of the MNIST family, plain or gzip: uint8 [N, H, W] (or [N, H, W, 3]) and labels.

    The labels lie beside the images under the family's naming (`train-images-idx3-ubyte` and
    `train-labels-idx1-ubyte`) or are given as `idx:IMAGES,LABELS`.
    """

    def __init__(self, paths: str) -> None:
        images, _, labels = paths.partition(",")
        self.images = Location(images)
        _require_path(self.images, "idx")
        self.labels = Location(labels) if labels else self._find_labels()
        if labels:
            _require_path(Location(labels), "idx")
        shape, _ = _read_idx(self.images.uri)
        if len(shape) not in (3, 4) or (len(shape) == 4 and shape[3] not in (1, 3)):
            raise ValueError(
                f"source=idx:{self.images} has shape {shape}: images must be [N, H, W] or"
                " [N, H, W, 1 or 3]; give the images file first, then a comma and the labels"
            )
        if self.labels is not None:
            label_shape, values = _read_idx(self.labels.uri)
            if len(values) < math.prod(label_shape):
                raise ValueError(
                    f"source=idx: {self.labels} ends after {len(values)} of its"
                    f" {math.prod(label_shape)} labels; fetch the file again"
                )
            if label_shape != shape[:1]:
                raise ValueError(
                    f"source=idx: {self.labels} has shape {label_shape}, but {self.images} has"
                    f" {shape[0]} images; name the labels that belong to them after a comma"
                )
        self.shape = shape

    def _find_labels(self) -> Location | None:
        name = self.images.name
        other = name.replace("images", "labels").replace("idx3", "idx1").replace("idx4", "idx1")
        beside = Location(self.images.uri.removesuffix(name) + other)
        return beside if other != name and beside.exists() else None

    def list_units(self) -> list[SourceUnit]:
        pixels_per_image = math.prod(self.shape[1:])
        if self.shape[0] == 0 or pixels_per_image == 0:
            raise ValueError(f"source=idx:{self.images} holds no image")
        # A cut-off file: its complete images, and one fault for all that is missing.
        num_whole = len(_read_idx(self.images.uri)[1]) // pixels_per_image
        num = min(self.shape[0], num_whole + 1)
        size = self.images.num_bytes() + (self.labels.num_bytes() if self.labels else 0)
        return [
            SourceUnit(
                index=i,
                name=self.images.name,
                start=s,
                stop=min(num, s + ROWS_PER_UNIT),
                num_bytes=size,
            )
            for i, s in enumerate(range(0, num, ROWS_PER_UNIT))
        ]

    def read_unit(self, unit: SourceUnit) -> Iterator[RawRecord]:
        shape, values = _read_idx(self.images.uri)
        pixels_per_image = math.prod(shape[1:])
        labels = _read_idx(self.labels.uri)[1] if self.labels is not None else None
        for row in range(unit.start, unit.stop):
            key = str(row)
            flat = values[row * pixels_per_image : (row + 1) * pixels_per_image]
            label = int(labels[row]) if labels is not None and row < len(labels) else None
            if len(flat) < pixels_per_image:
                yield RawRecord(key=key, content=None, label=label, error="truncated_file")
                continue
            yield RawRecord(key=key, content=flat.reshape(shape[1:]), label=label)


def _read_idx(uri: str) -> tuple[tuple[int, ...], npt.NDArray[np.uint8]]:
    """(shape, flat uint8 values); a cut-off file gives fewer values than its shape says."""
    filesystem, path = Location(uri).filesystem()
    info = filesystem.get_file_info(path)
    return _read_idx_version(uri, info.size, info.mtime_ns)


@functools.lru_cache(maxsize=4)
def _read_idx_version(
    uri: str, size: int | None, mtime_ns: int | None
) -> tuple[tuple[int, ...], npt.NDArray[np.uint8]]:
    """Read a file once per version of it: a unit is only a part of it."""
    if Location(uri).is_local and Location(uri).local_path.is_dir():
        raise ValueError(f"source=idx:{uri} is a folder: give the file of the images")
    content = Location(uri).read_bytes()
    if content[:2] == _GZIP:
        content = _gunzip_as_far_as_possible(content)
    if len(content) < 4 or content[:2] != b"\0\0" or content[2] != 0x08:
        raise ValueError(
            f"source=idx:{uri} is not an IDX file of unsigned bytes (it must start with 00 00 08);"
            " check the path"
        )
    num_dims = content[3]
    if len(content) < 4 + 4 * num_dims:
        raise ValueError(f"source=idx:{uri} ends inside its header; fetch the file again")
    shape = np.frombuffer(content, ">u4", count=num_dims, offset=4)
    return tuple(int(n) for n in shape), np.frombuffer(content, np.uint8, offset=4 + 4 * num_dims)


def _gunzip_as_far_as_possible(content: bytes) -> bytes:
    parts = []
    while content[:2] == _GZIP:  # a gzip file may have several members
        member = zlib.decompressobj(wbits=31)
        try:
            parts.append(member.decompress(content))
        except zlib.error:
            break
        content = member.unused_data
    return b"".join(parts)


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


SYNTHETIC_LARGE_SIDE = 128
