"""Where files live: one small face over pyarrow.fs for local folders and object stores.

Only whole objects and byte ranges are used, so that a local folder, S3, GCS, Azure and HDFS behave
alike. The privacy ledger does not use this module: it needs create-if-absent (privacy/ledger.py).
"""

from __future__ import annotations

import os
import re
import uuid
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
from pyarrow import fs

_STREAM_BUFFER_BYTES = 4 * 2**20
_SCHEMES = ("file", "s3", "gs", "gcs", "abfs", "abfss", "hdfs", "viewfs")
_CREDENTIALS = re.compile(r"://[^/@]*:[^/@]*@")


def without_credentials(place: str) -> str:
    """The place as given. Raises ValueError if it holds a password, which would be written down."""
    if _CREDENTIALS.search(place):
        raise ValueError(
            "it holds a user and a password (not shown), which would be written into manifests; "
            "give them by the environment, as for any tool of this storage"
        )
    return place


def checked_place(place: str) -> str:
    """The place as given, or `KIND:PLACE` of a source, if a Location of it can be read at all.

    Raises:
        ValueError: for a scheme that pyarrow.fs does not know, or a password.
    """
    scheme, separator, _ = without_credentials(place).partition("://")
    if separator and scheme.rpartition(":")[2] not in _SCHEMES:
        raise ValueError(
            f"is {place!r}: allowed are a local path, s3://, gs://, abfs:// or hdfs://; give "
            "one of these"
        )
    return place


@dataclass(frozen=True)
class Location:
    """A file or folder named by a URI (`/a/b`, `file:///a/b`, `s3://bucket/a`); cheap, picklable.

    Relative paths are made absolute when the Location is made, so that a worker process with
    another working directory still means the same place.
    """

    uri: str

    def __post_init__(self) -> None:
        if "://" not in self.uri:
            object.__setattr__(self, "uri", str(Path(self.uri).expanduser().absolute()))
        object.__setattr__(self, "uri", self.uri.rstrip("/"))

    def __truediv__(self, name: str) -> Location:
        return Location(f"{self.uri}/{name}")

    def __str__(self) -> str:
        return self.uri

    @property
    def is_local(self) -> bool:
        """Whether this is a path on this machine's own file systems (a shared mount included)."""
        return "://" not in self.uri or self.uri.startswith("file://")

    @property
    def local_path(self) -> Path:
        """The path of a local location; ValueError for an object store."""
        if not self.is_local:
            raise ValueError(f"{self.uri} is not a local path")
        return Path(self.uri.removeprefix("file://"))

    @property
    def name(self) -> str:
        """The last part of the path."""
        return self.uri.rsplit("/", 1)[-1]

    def filesystem(self) -> tuple[fs.FileSystem, str]:
        """The pyarrow file system and the path on it."""
        if self.is_local:
            return fs.LocalFileSystem(), str(self.local_path)
        return fs.FileSystem.from_uri(self.uri)

    def exists(self) -> bool:
        """Whether a file or folder is there."""
        if self.is_local:
            return os.path.exists(self.local_path)
        filesystem, path = self.filesystem()
        return filesystem.get_file_info(path).type != fs.FileType.NotFound

    def num_bytes(self) -> int:
        """The file's size; 0 if it is not there."""
        if self.is_local:  # pyarrow's own refuses names that are no UTF-8
            return self.local_path.stat().st_size if self.local_path.exists() else 0
        filesystem, path = self.filesystem()
        return filesystem.get_file_info(path).size or 0

    def open_stream(self, compression: str | None = None) -> pa.NativeFile:
        """The file to be read front to back. Raises FileNotFoundError or another OSError."""
        filesystem, path = self.filesystem()
        if not self.is_local:
            return filesystem.open_input_stream(
                path, compression=compression, buffer_size=_STREAM_BUFFER_BYTES
            )
        file = open(path, "rb")
        return pa.input_stream(file, compression=compression, buffer_size=_STREAM_BUFFER_BYTES)

    def read_bytes(self) -> bytes:
        """The whole file. Raises FileNotFoundError."""
        if self.is_local:
            return self.local_path.read_bytes()
        with self.open_stream() as stream:
            return stream.read()

    def read_text(self) -> str:
        """The whole file as UTF-8."""
        return self.read_bytes().decode()

    def write_bytes(self, content: bytes) -> None:
        """Write the whole file so that a reader sees the old or the new content, never a part."""
        if self.is_local:
            target = self.local_path
            target.parent.mkdir(parents=True, exist_ok=True)
            temporary = target.with_name(f".{target.name}.{uuid.uuid4().hex[:8]}")
            try:
                with open(temporary, "wb") as stream:
                    stream.write(content)
                    stream.flush()
                    os.fsync(stream.fileno())
                os.replace(temporary, target)
            except BaseException:
                temporary.unlink(missing_ok=True)
                raise
            return
        filesystem, path = self.filesystem()
        with filesystem.open_output_stream(path, compression=None) as stream:
            stream.write(content)

    def write_text(self, content: str) -> None:
        """Write UTF-8 text as `write_bytes` does."""
        self.write_bytes(content.encode())

    def list(self, *, recursive: bool = False) -> list[Location]:
        """The files and folders below, sorted by name; empty if the folder is not there.

        Names that start with a dot below this folder (unfinished writes) are left out.
        """
        filesystem, path = self.filesystem()
        selector = fs.FileSelector(path, allow_not_found=True, recursive=recursive)
        found = filesystem.get_file_info(selector)
        below = sorted(info.path[len(path) :].strip("/") for info in found)
        visible = (name for name in below if not any(p.startswith(".") for p in name.split("/")))
        return [self / name for name in visible]

    def delete(self) -> None:
        """Delete the file, or the folder with all below it; nothing happens if it is not there."""
        filesystem, path = self.filesystem()
        kind = filesystem.get_file_info(path).type
        if kind == fs.FileType.Directory:
            filesystem.delete_dir(path)
        elif kind == fs.FileType.File:
            filesystem.delete_file(path)


def system_reason(error: OSError) -> str:
    """What the operating system says of a failure, without the file it is about."""
    return os.strerror(error.errno) if error.errno else type(error).__name__
