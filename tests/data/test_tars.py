"""tars.py: what ordinary tars hold is read; what broken ones hold is reported."""

from __future__ import annotations

import io
import tarfile

import numpy as np
import pytest

from pipeline.data.tars import MAX_MEMBER_BYTES, TarMember, read_tar_members


def tar_of(members: list[tuple[str, bytes]], tar_format: int = tarfile.GNU_FORMAT) -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w", format=tar_format) as tar:
        for name, content in members:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return stream.getvalue()


def walk(content: bytes) -> list[TarMember]:
    return list(read_tar_members(io.BytesIO(content)))


MEMBERS = [("a.jpg", b"x" * 700), ("folder/b.cls", b"3"), ("empty", b""), ("c.png", b"y" * 512)]


@pytest.mark.parametrize(
    "tar_format", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT]
)
def test_reads_what_tarfile_writes(tar_format: int) -> None:
    names = {
        tarfile.USTAR_FORMAT: "p" * 90 + "/" + "q" * 60 + ".jpg",
        tarfile.GNU_FORMAT: "n" * 300 + ".jpg",
        tarfile.PAX_FORMAT: "bäume/" + "n" * 300 + ".jpg",
    }
    members = [*MEMBERS, (names[tar_format], b"z" * 1000), ("after", b"short name again")]
    got = walk(tar_of(members, tar_format))
    assert [(member.name, member.content) for member in got] == members
    assert all(member.error is None for member in got)


def test_links_folders_and_devices_are_no_members() -> None:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as tar:
        for kind in (tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.DIRTYPE, tarfile.CHRTYPE):
            info = tarfile.TarInfo("something")
            info.type, info.linkname = kind, "/etc/passwd"
            tar.addfile(info)
        info = tarfile.TarInfo("last.jpg")
        info.size = 3
        tar.addfile(info, io.BytesIO(b"abc"))
    assert walk(stream.getvalue()) == [TarMember(name="last.jpg", content=b"abc")]


def test_concatenated_tars_are_read_through() -> None:
    assert len(walk(tar_of(MEMBERS) + tar_of(MEMBERS))) == 2 * len(MEMBERS)


def test_base_256_and_absurd_sizes() -> None:
    content = bytearray(tar_of([("a.jpg", b"abc")]))

    def with_size(field: bytes) -> bytes:
        header = bytearray(content[:512])
        header[124:136] = field
        header[148:156] = b" " * 8
        header[148:156] = b"%06o\0 " % sum(header)
        return bytes(header) + bytes(content[512:])

    assert walk(with_size(b"\x80" + (3).to_bytes(11, "big")))[0].content == b"abc"
    absurd = walk(with_size(b"\x80" + (2**62).to_bytes(11, "big")))
    assert [member.error for member in absurd] == ["truncated_tar"]
    assert walk(with_size(b"not a number"))[0].error == "damaged_tar_header"
    assert 2**62 > MAX_MEMBER_BYTES


def test_walk_goes_on_after_a_damaged_header() -> None:
    content = bytearray(tar_of(MEMBERS))
    content[5] ^= 0xFF  # in the first header: its checksum no longer holds
    got = walk(bytes(content))
    assert got[0].error == "damaged_tar_header"
    assert [member.name for member in got[1:]] == [name for name, _ in MEMBERS[1:]]


def test_an_archive_that_does_not_end_is_told() -> None:
    """A copy that broke off between two members has lost the rest, or all, of them."""
    whole = tar_of(MEMBERS)
    cut = walk(whole[: 512 + 1024 + 512 + 512])
    assert [member.name for member in cut] == ["a.jpg", "folder/b.cls", ""]
    assert [member.error for member in cut] == [None, None, "truncated_tar"]
    assert [member.error for member in walk(b"")] == ["truncated_tar"]
    twice = walk(whole + whole)
    assert len(twice) == 2 * len(MEMBERS) and not any(member.error for member in twice)


def test_any_truncation_and_any_damage_is_reported_and_never_raised() -> None:
    content = tar_of(MEMBERS)
    end_of_members = content.rindex(b"y") + 1
    for length in range(0, end_of_members, 97):
        got = walk(content[:length])
        is_whole = all(member.error is None for member in got)
        assert not is_whole or length % 512 == 0
        for member, expected in zip(got, MEMBERS, strict=False):
            assert member.error or (member.name, member.content) == expected
    generator = np.random.default_rng(1)
    for _ in range(300):
        damaged = bytearray(content)
        for position in generator.integers(0, len(content), 8):
            damaged[position] = generator.integers(256)
        walk(bytes(damaged))
