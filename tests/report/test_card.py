"""The model card, as the hub would read it."""

from __future__ import annotations

import dataclasses

import yaml

from pipeline.report.card import model_card
from pipeline.report.facts import PUBLIC_DATA_ONLY
from tests.report.report_inputs import EVALUATION, PRIVACY, probe, report_inputs, warmup


def test_front_matter() -> None:
    head, front, body = model_card(report_inputs()).split("---\n", 2)
    assert head == ""
    fields = yaml.safe_load(front)
    assert fields["license"] == "apache-2.0"
    assert fields["library_name"] == "timm"
    assert "differential-privacy" in fields["tags"]
    assert body.lstrip().startswith("# demo")


def test_what_a_reader_needs() -> None:
    card = model_card(report_inputs())
    for words in (
        'timm.create_model("local-dir:runs/demo/export", pretrained=True)',
        "| demo | 7.6211 | 7.9822 | 9.1034 | 8.333e-06 | 60,000 |",
        "Protected: one prepared record. Accountant: PLD, dp-accounting 0.6.0.",
        "| private | private | 60,000 private images | 150 | 2,048 | 307,200 |",
        "| after private | last_12_blocks | 82.6 [81.6, 83.6] | 50.0 [45.0, 55.0] |",
        "Fitted on: 5,000 images of benchmark.probe.",
        "Seed 0. Probe: Wilson 95 % interval. Few-shot: mean of 5 draws",
        "| after private | 0.5410 | 0.5310 to 0.5510 | 2,000 of benchmark.score | on (0.01) |",
        "- `last_block`: what last_block means",
        "## Limitations",
    ):
        assert words in card, words


def test_tables_have_the_columns_of_their_heads() -> None:
    for inputs in (report_inputs(), report_inputs(evaluation=no_few_shot())):
        for block in model_card(inputs).split("\n\n"):
            if block.startswith("|"):
                assert len({line.count("|") for line in block.splitlines()}) == 1


def no_few_shot() -> dict:
    return EVALUATION | {"probes": [probe("a", "last_block", 0.5, None)], "losses": []}


def test_without_few_shot_or_evaluation() -> None:
    assert "per class" not in model_card(report_inputs(evaluation=no_few_shot()))
    assert "## Evaluation" not in model_card(report_inputs(evaluation=None))


def test_weights_without_a_guarantee_are_called_so() -> None:
    assert "**NOT PRIVATE: there is no guarantee." in model_card(
        report_inputs(
            guarantee="NOT PRIVATE", privacy=(dataclasses.replace(PRIVACY, epsilon=None),)
        )
    )


def test_public_only() -> None:
    card = model_card(report_inputs(guarantee=PUBLIC_DATA_ONLY, privacy=(), phases=(warmup(),)))
    assert "No private record was read." in card


def test_bars_in_names_do_not_break_tables() -> None:
    card = model_card(report_inputs(phases=(warmup(images="a|b"),)))
    assert "a\\|b" in card
