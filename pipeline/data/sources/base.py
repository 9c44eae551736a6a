"""What a source is: units that are read on their own, and records as they were found."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import stat
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from pyarrow import fs

from pipeline.storage import Location

IMAGE_SUFFIXES = (
    *("jpg", "jpeg", "png", "webp", "ppm", "pgm", "bmp", "tif", "tiff"),
    *("gif", "avif", "jp2", "heic", "heif"),
)
GZIP = b"\x1f\x8b"
LISTING_PAUSES = (0.5, 1.0, 2.0, 4.0)
"""Seconds between two tries to list an object store."""


@dataclass(frozen=True, kw_only=True)
class RawRecord:
    """One picture as found: encoded bytes or uint8 pixels, or the reason why there is neither."""

    key: str
    content: bytes | npt.NDArray[np.uint8] | None
    label: int | None = None
    error: str | None = None
    group: str | None = None
    """Whose it is, where the privacy unit is a group of records."""


@dataclass(frozen=True, kw_only=True)
class SourceUnit:
    """A part of a source that is read as a whole: its place in the order and what to read."""

    index: int
    name: str
    items: tuple[tuple[str, int | None], ...] = ()
    groups: tuple[str, ...] = ()
    """Of each item, where there are groups."""
    start: int = 0
    stop: int = 0
    faults: tuple[tuple[str, str], ...] = ()
    """(name, error) of what the listing already knows cannot be read."""
    num_bytes: int = 0
    """Size of all files behind it, so that a change of them shows."""

    def fingerprint(self) -> str:
        """Text that changes when the unit means other records."""
        content = [self.name, self.items, self.start, self.stop, self.faults, self.num_bytes]
        return json.dumps([*content, self.groups] if self.groups else content)


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


def suffix_of(name: str) -> str:
    """What stands behind the last dot, in lower case."""
    return name.rpartition("/")[2].rpartition(".")[2].lower()


@dataclass(frozen=True, kw_only=True)
class Listing:
    """What lies below a folder, sorted: (relative path, size) of files, (path, error) of others."""

    files: list[tuple[str, int]]
    faults: list[tuple[str, str]]


def list_below(root: Location) -> Listing:
    """All visible files below a folder.

    A link to a file counts as the file. A link to a folder is not followed, since it may lead back
    to where it lies: it is a fault, and so is a folder that may not be listed.
    """
    if not root.is_local:
        filesystem, path = root.filesystem()
        infos = _listed(filesystem, fs.FileSelector(path, recursive=True))
        named = [(info.path[len(path) :].lstrip("/"), info) for info in infos]
        files = [(name, info.size or 0) for name, info in named if info.type == fs.FileType.File]
        is_hidden = re.compile(r"(^|/)\.").search
        return Listing(files=sorted(f for f in files if not is_hidden(f[0])), faults=[])
    listing = Listing(files=[], faults=[])
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


def _listed(filesystem: fs.FileSystem, selector: fs.FileSelector) -> list[fs.FileInfo]:
    """A listing of an object store, which may fail now and then: tried again, then OSError."""
    for seconds in LISTING_PAUSES:
        with contextlib.suppress(OSError):
            return list(filesystem.get_file_info(selector))
        time.sleep(seconds)
    return list(filesystem.get_file_info(selector))


def fault_units(faults: Sequence[tuple[str, str]], index: int) -> list[SourceUnit]:
    """What a listing found unreadable, (name, error), as the last unit; none where all is well."""
    if not faults:
        return []
    return [SourceUnit(index=index, name="not readable", faults=tuple(faults))]


def faulty_records(unit: SourceUnit) -> Iterator[RawRecord]:
    """The records of such a unit."""
    for name, error in unit.faults:
        yield RawRecord(key=name, content=None, error=error)


def printable(name: str) -> str:
    """A file name as text that UTF-8 can hold: bytes that are no UTF-8 become \\xNN."""
    return os.fsencode(name).decode("utf-8", "backslashreplace")


def require_folder(root: Location, kind: str) -> None:
    """Raise ValueError unless there is a folder."""
    require_path(root, kind)
    if root.is_local and not root.local_path.is_dir():
        raise ValueError(f"source={kind}:{root} is a file: give the folder that holds the files")


def require_path(root: Location, kind: str) -> None:
    """Raise ValueError unless there is something."""
    if not root.exists():
        raise ValueError(f"source={kind}:{root} does not exist: check the path and its spelling")


def told(faults: list[tuple[str, str]]) -> str:
    """The first of the listing's faults, in words, for an error."""
    if not faults:
        return ""
    name, error = faults[0]
    return f"; left out {len(faults)}, the first {printable(name) or 'the folder'!r} ({error})"
