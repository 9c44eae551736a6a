"""Made-up facts of a run, for tests of the page and the card."""

from __future__ import annotations

import numpy as np

from pipeline.report.facts import (
    DIFFERENTIAL_PRIVACY,
    MetricPoint,
    ModelFacts,
    PhaseFacts,
    Pictures,
    PrivacyFacts,
    ReportInputs,
)

MODEL = ModelFacts(
    size="test",
    image_size=28,
    patch_size=7,
    mask_ratio=0.75,
    norm_pix_loss=True,
    num_parameters=527_795,
    num_encoder_parameters=461_856,
)
PRIVACY = PrivacyFacts(
    domain="demo",
    epsilon=7.6211,
    run_epsilon=7.9822,
    domain_epsilon=9.1034,
    delta=1 / 120_000,
    accountant="PLD, dp-accounting 0.6.0",
    unit="one prepared record",
    num_records=60_000,
    sampling_probability=2048 / 60_000,
    expected_batch_size=2_048,
    num_steps=150,
    noise_multiplier=0.6741,
    max_grad_norm=1.0,
    target_epsilon=8.0,
)


def warmup(**changes) -> PhaseFacts:
    points = [
        MetricPoint(
            step=50 * i,
            learning_rate=1e-3 / i,
            epsilon=None,
            images_per_second=2_400,
            held_out_loss=2 / i,
            train_loss=2.1 / i,
        )
        for i in range(1, 9)
    ]
    options = {
        "name": "warmup",
        "kind": "public",
        "images": "19,000 procedural images",
        "held_out": "synthetic.held_out",
        "num_steps": 400,
        "batch_size": 256,
        "points": points,
    } | changes
    return PhaseFacts(**options)


def private(**changes) -> PhaseFacts:
    points = [
        MetricPoint(
            step=50 * i,
            learning_rate=3e-3 / i,
            epsilon=[5.0, 6.9, 7.9822][i - 1],
            images_per_second=None,
            held_out_loss=0.6 / i,
        )
        for i in range(1, 4)
    ]
    options = {
        "name": "private",
        "kind": "private",
        "images": "60,000 private images",
        "held_out": "benchmark.probe",
        "num_steps": 150,
        "batch_size": 2_048,
        "points": points,
    } | changes
    return PhaseFacts(**options)


def probe(model: str, rule: str, accuracy: float, few_shot: float | None = 0.5) -> dict:
    shared = {"num_test": 5_000, "seed": 0, "rule": rule}
    few = None
    if few_shot is not None:
        few = shared | {"accuracy": few_shot, "interval": [0.45, 0.55], "shots": 10, "draws": 5}
    return {
        "model": model,
        "rule": rule,
        "rule_description": f"what {rule} means",
        "linear_probe": shared
        | {"accuracy": accuracy, "interval": [accuracy - 0.01, accuracy + 0.01], "num_train": 5000},
        "few_shot": few,
    }


def loss(model: str, value: float) -> dict:
    return {
        "model": model,
        "loss": value,
        "interval": [value - 0.01, value + 0.01],
        "num_images": 2_000,
        "images": "benchmark.score",
        "norm_pix_loss": True,
        "norm_pix_epsilon": 0.01,
        "mask_ratio": 0.75,
    }


EVALUATION = {
    "seed": 0,
    "images": [
        {"role": "fitted on", "name": "benchmark.probe", "num_images": 5_000},
        {"role": "scored on", "name": "benchmark.score", "num_images": 5_000},
    ],
    "probes": [
        probe("raw pixels", "raw grey pixels, 28 x 28", 0.824),
        probe("random encoder", "last_block", 0.723),
        probe("warmup alone", "last_block", 0.85),
        probe("after private", "last_block", 0.781),
        probe("after private", "last_12_blocks", 0.826),
    ],
    "losses": [loss("random encoder", 1.99), loss("after private", 0.541)],
}


def pictures(count: int = 3, size: int = 28) -> Pictures:
    random = np.random.default_rng(0)
    parts = (random.integers(0, 256, (count, size, size, 3), dtype=np.uint8) for _ in range(3))
    original, masked, filled = parts
    return Pictures(
        source="benchmark.probe", original=original, masked=masked, reconstructed=filled
    )


def report_inputs(**changes) -> ReportInputs:
    options = {
        "run": "demo",
        "guarantee": DIFFERENTIAL_PRIVACY,
        "model": MODEL,
        "privacy": (PRIVACY,),
        "phases": (warmup(), private()),
        "evaluation": EVALUATION,
        "pictures": pictures(),
        "statement_markdown": "# Privacy statement\n\nThese weights are private.\n\n## Trusted\n",
        "recipe_yaml": "name: demo\nmodel: {size: test}\n",
        "export": "runs/demo/export",
    } | changes
    return ReportInputs(**options)
