"""A walk over untrusted tars: members are read in order, nothing is ever extracted."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import IO

MAX_MEMBER_BYTES = 512 * 2**20
MAX_NAME_BYTES = 2**20
BLOCK = 512

REGULAR_FILE = (b"0", b"\0", b"7")
LONG_NAME, PAX_HEADER = b"L", b"x"
ABOUT_OTHERS = (LONG_NAME, PAX_HEADER, b"g", b"K")
WITHOUT_CONTENT = (b"1", b"2", b"3", b"4", b"5", b"6")
SPARSE = b"S"


@dataclass(frozen=True, kw_only=True)
class TarMember:
    """A file inside a tar: its name (never used as a path) and content, or an error code."""

    name: str
    content: bytes | None = None
    error: str | None = None


class _Cut(Exception):
    """The stream ended, or broke, inside a member."""


def read_tar_members(stream: IO[bytes]) -> Iterator[TarMember]:
    """Regular files of a tar, in order; every fault is a member with an `error`.

    Understands ustar, GNU long names and pax headers. After a damaged header the walk goes on at
    the next block that is a valid one.

    Args:
        stream: an open, uncompressed tar from an untrusted source; read once, front to back.

    Guarantees:
        1. Nothing is written to disk, whatever the names say (test_untrusted_images).
        2. Truncation, damaged headers and absurd sizes are reported, never raised
           (test_untrusted_images).
    """
    name = ""
    try:
        for header in _headers(stream):
            name = ""
            if isinstance(header, TarMember):
                yield header
                continue
            name = header.name
            member = _member(stream, header)
            name = ""
            if member is not None:
                yield member
    except _Cut:
        yield TarMember(name=name, error="truncated_tar")


@dataclass(frozen=True, kw_only=True)
class _Header:
    name: str
    kind: bytes
    size: int

    @property
    def padded(self) -> int:
        return -(-self.size // BLOCK) * BLOCK


def _headers(stream: IO[bytes]) -> Iterator[_Header | TarMember]:
    """The headers of members, long names resolved; a damaged one is a fault, told once."""
    long_name: str | None = None
    is_lost = is_ended = False
    while block := _read(stream, BLOCK, is_end_allowed=True):
        is_ended = not block.strip(b"\0")
        if is_ended:
            continue  # end-of-archive blocks; concatenated tars go on after them
        size, kind = _number(block[124:136]), block[156:157]
        is_header = _has_checksum(block) and (
            kind not in ABOUT_OTHERS or (size is not None and size <= MAX_NAME_BYTES)
        )
        if not is_header or size is None:
            if not is_lost:
                yield TarMember(name="", error="damaged_tar_header")
            is_lost, long_name = True, None
            continue
        is_lost = False
        header = _Header(name=long_name or _name(block), kind=kind, size=size)
        if kind not in ABOUT_OTHERS:
            long_name = None
            yield header
            continue
        content = _read(stream, header.padded)[:size]
        if kind == LONG_NAME:
            long_name = content.rstrip(b"\0").decode("utf-8", "replace")
        elif kind == PAX_HEADER and (found := re.search(rb"\d+ path=([^\n]*)\n", content)):
            long_name = found[1].decode("utf-8", "replace")
    if not is_ended and not is_lost:
        raise _Cut  # between two members: an archive ends with a block of zeros


def _member(stream: IO[bytes], header: _Header) -> TarMember | None:
    """Read or skip what belongs to a header; None where that is no file. Raises _Cut."""
    if header.kind in WITHOUT_CONTENT:
        return None
    if header.kind in REGULAR_FILE and header.size <= MAX_MEMBER_BYTES:
        return TarMember(name=header.name, content=_read(stream, header.padded)[: header.size])
    left = header.padded
    while left > 0:
        left -= len(_read(stream, min(left, 2**20)))
    if header.kind in REGULAR_FILE:
        return TarMember(name=header.name, error="too_many_bytes")
    # GNU sparse files: nobody stores pictures so. Other kinds hold no file.
    return TarMember(name=header.name, error="sparse_tar_member") if header.kind == SPARSE else None


def _read(stream: IO[bytes], size: int, *, is_end_allowed: bool = False) -> bytes:
    """Exactly `size` bytes; b"" at the end of the stream where that is allowed. Raises _Cut."""
    try:
        content = stream.read(size) if size else b""
    except (OSError, EOFError):
        raise _Cut from None
    if len(content) < size and (content or not is_end_allowed):
        raise _Cut
    return content


def _has_checksum(block: bytes) -> bool:
    try:
        stated = int(block[148:156].strip(b" \0") or b"-1", 8)
    except ValueError:
        return False
    return sum(block) - sum(block[148:156]) + 8 * 32 == stated


def _number(field: bytes) -> int | None:
    """A tar number: octal text, or base 256 where the first bit is set."""
    if field[0] & 0x80:
        return int.from_bytes(field[1:], "big")
    try:
        return max(0, int(field.strip(b" \0") or b"0", 8))
    except ValueError:
        return None


def _name(header: bytes) -> str:
    name = header[:100].partition(b"\0")[0]
    is_posix = header[257:263] == b"ustar\0"  # GNU's own magic has other fields there
    prefix = header[345:500].partition(b"\0")[0] if is_posix else b""
    return (prefix + b"/" + name if prefix else name).decode("utf-8", "replace")
