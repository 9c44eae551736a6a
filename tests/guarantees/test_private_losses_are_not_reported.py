"""Pitfall 20: losses, counts and norms of private images were published."""

from __future__ import annotations

import dataclasses

import pytest

from pipeline.report.card import model_card
from pipeline.report.facts import MetricPoint
from pipeline.report.render import render_html
from tests.report.report_inputs import private, report_inputs, warmup


@pytest.mark.parametrize("field", ["train_loss", "images_per_second"])
def test_loss_and_speed_of_a_private_phase_cannot_be_told(field: str) -> None:
    """Guarantee 1 of PhaseFacts."""
    points = list(private().points)
    points[1] = dataclasses.replace(points[1], **{field: 0.61})
    with pytest.raises(ValueError, match=f"'private' is private and has a {field}") as refusal:
        private(points=points)
    assert "0.61" not in str(refusal.value)


def test_a_point_has_no_room_for_other_private_facts() -> None:
    """A new field has to be thought about here: is it public in a private phase?"""
    assert {field.name for field in dataclasses.fields(MetricPoint)} == {
        "step",
        "learning_rate",
        "epsilon",
        "images_per_second",
        "held_out_loss",
        "train_loss",
    }


def test_throughput_is_told_with_two_digits() -> None:
    points = [dataclasses.replace(p, images_per_second=1987.654) for p in warmup().points]
    assert {point.images_per_second for point in points} == {2_000}
    page = render_html(report_inputs(phases=(warmup(points=points),)))
    assert "2,000" in page
    assert "1,987" not in page
    assert "1987" not in page
    assert "1987" not in model_card(report_inputs(phases=(warmup(points=points),)))
