"""Charts and pictures are whole files inside data URIs."""

from __future__ import annotations

import base64
import io
from xml.etree import ElementTree

import numpy as np
import pytest
from PIL import Image

from pipeline.report.figures import (
    loss_chart,
    picture_strip,
    privacy_chart,
    probe_chart,
    rate_chart,
    speed_chart,
)
from tests.report.report_inputs import EVALUATION, PRIVACY, pictures, private, probe, warmup

CHARTS = {
    "privacy": lambda: privacy_chart((warmup(), private(), private(name="second")), (PRIVACY,)),
    "loss": lambda: loss_chart(warmup(), True),
    "no loss": lambda: loss_chart(private(points=[]), False),
    "rate": lambda: rate_chart(private()),
    "no rate": lambda: rate_chart(private(points=[])),
    "speed": lambda: speed_chart(private()),
    "probes": lambda: probe_chart(EVALUATION["probes"]),
    "probes without few-shot": lambda: probe_chart([probe("a", "last_block", 0.5, None)]),
    "no private point": lambda: privacy_chart((private(points=[]),), ()),
}


def content(uri: str, kind: str) -> bytes:
    head, _, body = uri.partition(",")
    assert head == f"data:{kind};base64"
    return base64.b64decode(body, validate=True)


@pytest.mark.parametrize("name", CHARTS)
def test_charts_are_drawings_that_never_change(name: str) -> None:
    chart = CHARTS[name]()
    drawing = ElementTree.fromstring(content(chart, "image/svg+xml"))
    assert drawing.tag.endswith("svg")
    assert chart == CHARTS[name]()
    assert b"<text" not in content(chart, "image/svg+xml"), "no font of the reader is needed"


def test_every_epsilon_moves_the_privacy_chart() -> None:
    other = private(points=private().points[:-1])
    assert privacy_chart((private(),), (PRIVACY,)) != privacy_chart((other,), (PRIVACY,))


def test_pictures_side_by_side_pixel_for_pixel() -> None:
    shown = pictures(1)
    strip = picture_strip((shown.original[0], shown.masked[0], shown.reconstructed[0]))
    pixels = np.asarray(Image.open(io.BytesIO(content(strip, "image/png"))))
    assert pixels.shape == (4 * 28, 3 * 4 * 28 + 2 * 6, 3)
    np.testing.assert_array_equal(pixels[1::4, 1 : 4 * 28 : 4], shown.original[0])
    np.testing.assert_array_equal(pixels[2::4, 4 * 28 + 6 + 2 : 8 * 28 + 6 : 4], shown.masked[0])
    np.testing.assert_array_equal(pixels[::4, 8 * 28 + 12 :: 4], shown.reconstructed[0])
    assert (pixels[:, 4 * 28 : 4 * 28 + 6] == 255).all()


def test_large_pictures_keep_their_size() -> None:
    shown = pictures(1, size=224)
    strip = picture_strip((shown.original[0], shown.masked[0]))
    assert Image.open(io.BytesIO(content(strip, "image/png"))).size == (2 * 224 + 6, 224)
