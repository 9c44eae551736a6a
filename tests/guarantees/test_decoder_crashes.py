"""A decoder that crashes, hangs or eats memory costs one picture, and says nothing about it."""

from __future__ import annotations

import io
import os
import time
from pathlib import Path

import pytest
from PIL import Image

from pipeline.data.images import ImageError
from pipeline.data.prepare import PrepareConfig, isolation, parts, prepare, read_summary
from pipeline.data.prepare.conversion import ConversionRules, Converted, convert
from pipeline.data.prepare.isolation import IsolatedConverter
from pipeline.storage import Location

RULES = ConversionRules(short_side=32, jpeg_quality=95)

# The keeper of these tests: its decoder does to some bytes what a hostile file does to a real one.
_HOSTILE_KEEPER = """
import os, signal, time
from pipeline.data.prepare import isolation
genuine = isolation.convert
def convert(content, rules):
    if content == b"segmentation fault":
        os.kill(os.getpid(), signal.SIGSEGV)
    if content == b"abort":
        print("a private picture is odd", flush=True)
        os.abort()
    if content == b"endless":
        time.sleep(1e6)
    if content == b"memory":
        bytearray(2**40)
    if content == b"tell":
        os.write(1, b"private"); os.write(2, b"private")
    return genuine(content, rules)
isolation.convert, isolation.MAX_SECONDS = convert, 1.0
isolation.keep()
"""


@pytest.fixture
def hostile(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every keeper that is started is one with that decoder."""
    monkeypatch.setattr(isolation, "_KEEPER", _HOSTILE_KEEPER)
    monkeypatch.setattr(isolation, "_idle", [])


def png(value: int) -> bytes:
    stream = io.BytesIO()
    Image.new("RGB", (40, 40), (value, 0, 0)).save(stream, "PNG")
    return stream.getvalue()


def test_a_crash_costs_the_picture_and_not_the_batch(hostile: None) -> None:
    converter = IsolatedConverter()
    contents = [
        *(png(0), b"segmentation fault", png(1), b"no picture", b"endless", b"abort"),
        *(b"memory", b"tell", png(2)),
    ]
    found = converter.convert(contents, RULES)
    reasons = [each.reason if isinstance(each, ImageError) else "" for each in found]
    assert reasons == [
        *("", "decoder_crashed", "", "unknown_format", "decoder_too_slow", "decoder_crashed"),
        *("out_of_memory", "unknown_format", ""),
    ]
    for place, value in ((0, 0), (2, 1), (8, 2)):
        assert found[place] == convert(png(value), RULES)
    assert converter.convert([png(3)], RULES) == [convert(png(3), RULES)]
    converter.close()


def test_the_same_bytes_as_without_isolation() -> None:
    rules = ConversionRules(short_side=16, jpeg_quality=80, with_perceptual_hash=True)
    converter = IsolatedConverter()
    contents = [png(7), png(200) + bytes(3 * 2**20)]
    assert converter.convert(contents, rules) == [convert(content, rules) for content in contents]
    assert converter.convert([], rules) == []
    converter.close()


def test_prepare_goes_on_and_counts_them(
    hostile: None, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch
) -> None:
    monkeypatch.setattr(parts, "BATCH_RECORDS", 3)
    folder = tmp_path / "images"
    folder.mkdir()
    for number in range(7):
        (folder / f"{number}.png").write_bytes(png(number))
    (folder / "1.5.png").write_bytes(b"segmentation fault")
    (folder / "4.5.png").write_bytes(b"abort")
    out = Location(str(tmp_path / "out"))
    config = PrepareConfig(
        name="odd", source=f"imagefolder:{folder}", visibility="private", domain="d"
    )
    before = set(os.listdir(tmp_path))
    manifest = prepare(config, out, num_workers=1)[""]
    assert manifest.num_records == 7
    assert read_summary(out)["left_out"] == {"decoder_crashed": 2}
    output = capfd.readouterr()
    assert not output.out and not output.err, "a crash of a decoder tells of a private picture"
    assert set(os.listdir(tmp_path)) == before | {"out"}
    isolation.close_idle_converters()


def test_a_decoder_that_cannot_be_started_stops_the_prepare(tmp_path: Path, monkeypatch) -> None:
    """It is this machine's fault and not the pictures': none of them is left out for it."""
    monkeypatch.setattr(isolation, "_KEEPER", "raise SystemExit(3)")
    monkeypatch.setattr(isolation, "_idle", [])
    with pytest.raises(OSError, match=r"decodes images ended \(exit code (3|-15)\)"):
        IsolatedConverter().convert([png(0)], RULES)


def test_no_process_is_left(hostile: None) -> None:
    with isolation.isolated_converter() as converter:
        assert isinstance(converter.convert([png(0)], RULES)[0], Converted)
        keeper = converter._keeper
    assert keeper is not None and keeper.poll() is None
    with isolation.isolated_converter() as again:
        assert again is converter
    isolation.close_idle_converters()
    assert keeper.poll() is not None


def test_ctrl_c_does_not_wait_for_a_picture_that_takes_long(hostile: None) -> None:
    """Nor is its process left behind."""
    started = time.monotonic()
    with pytest.raises(KeyboardInterrupt), isolation.isolated_converter() as converter:
        converter.convert([png(0)], RULES)
        keeper = converter._keeper
        assert keeper is not None and keeper.stdin is not None
        children = Path(f"/proc/{keeper.pid}/task/{keeper.pid}/children").read_text().split()
        isolation._write_frame(
            keeper.stdin.fileno(), isolation._packed_request([b"endless"], RULES)
        )
        raise KeyboardInterrupt
    assert keeper.poll() is not None and time.monotonic() - started < 60
    assert len(children) == 1 and not Path(f"/proc/{children[0]}").exists()
    assert isolation._idle == []
