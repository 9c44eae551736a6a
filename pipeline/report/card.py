"""The model card: what travels with the encoder, in the form the Hugging Face hub reads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import yaml

from pipeline.report.facts import PhaseFacts, PrivacyFacts, ReportInputs

TAGS = (
    "image-feature-extraction",
    "timm",
    "vision-transformer",
    "masked-autoencoder",
    "differential-privacy",
)

_LIMITATIONS = (
    "The guarantee covers one privacy unit as the statement defines it. Several records of one "
    "person or owner, and copies that are not exact, weaken it.",
    "It covers these weights. Data used later to fine-tune or probe them is not covered.",
    "What the statement lists as not covered (how the records were chosen, hyper-parameter search, "
    "timing) is not covered.",
    "Differential privacy hides the influence of single records; it removes neither bias nor "
    "unwanted content that many records share.",
    "The encoder gives features, not decisions; test it on your own task and population first.",
)


def model_card(inputs: ReportInputs) -> str:
    """The card as Markdown with a YAML head.

    Args:
        inputs: The facts of the run, as for the report; its pictures and recipe are not used.
    """
    front = {
        "license": "apache-2.0",
        "library_name": "timm",
        "pipeline_tag": "image-feature-extraction",
        "tags": list(TAGS),
    }
    model = inputs.model
    parts = [
        f"---\n{yaml.safe_dump(front, sort_keys=False)}---",
        f"# {inputs.run}",
        f"Vision transformer encoder, size {model.size} ({model.num_encoder_parameters:,} trained "
        f"parameters, {model.image_size}-pixel images, patches of {model.patch_size}), pre-trained "
        f"as a masked autoencoder with dp-pretrain. Guarantee: **{inputs.guarantee}**.",
        _usage(inputs),
        _privacy(inputs),
        _training(inputs),
        _evaluation(inputs.evaluation),
        "## Limitations\n\n" + "\n".join(f"- {text}" for text in _LIMITATIONS),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _usage(inputs: ReportInputs) -> str:
    folder = inputs.export or "path/to/this/folder"
    return f"""## Use

```python
import timm
import torch

encoder = timm.create_model("local-dir:{folder}", pretrained=True).eval()
transform = timm.data.create_transform(**timm.data.resolve_data_config(model=encoder))
with torch.no_grad():
    features = encoder(transform(image).unsqueeze(0))
```

The output is the mean of the patch tokens after the final norm (rule `last_block` below)."""


def _privacy(inputs: ReportInputs) -> str:
    if not inputs.privacy:
        text = "No private record was read." if not inputs.is_private else "See `PRIVACY.md`."
        return f"## Privacy\n\n{text}"
    lines = ["## Privacy", ""]
    if not inputs.is_private:
        lines += [f"**{inputs.guarantee}: there is no guarantee. Do not release as private.**", ""]
    lines += [
        "| privacy domain | epsilon, this model | this run | all runs | delta | N | q | B | steps |"
        " noise multiplier | max_grad_norm |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
        *(_privacy_row(privacy) for privacy in inputs.privacy),
        "",
        f"Protected: {inputs.privacy[-1].unit}. Accountant: {inputs.privacy[-1].accountant}. The "
        f"full statement, with what is not covered, is in `PRIVACY.md` and `privacy.json`.",
    ]
    return "\n".join(lines)


def _privacy_row(privacy: PrivacyFacts) -> str:
    epsilons = (privacy.epsilon, privacy.run_epsilon, privacy.domain_epsilon)
    cells = [
        privacy.domain,
        # Rounded up already; rounding again could understate.
        *("no bound" if epsilon is None else f"{epsilon:.10g}" for epsilon in epsilons),
        f"{privacy.delta:.4g}",
        "private" if privacy.num_records is None else f"{privacy.num_records:,}",
        f"{privacy.sampling_probability:.6g}",
        f"{privacy.expected_batch_size:,}",
        f"{privacy.num_steps:,}",
        f"{privacy.noise_multiplier:g}",
        f"{privacy.max_grad_norm:g}",
    ]
    return _row(cells)


def _training(inputs: ReportInputs) -> str:
    switch = "on" if inputs.model.norm_pix_loss else "off"
    hidden = f"{100 * inputs.model.mask_ratio:.0f} %"
    rows = [
        "## Training",
        "",
        f"Loss: squared error on {hidden} hidden patches, norm_pix_loss {switch}. Phases:",
        "",
        "| phase | kind | images | steps | images a step | images seen |",
        "|---|---|---|---|---|---|",
        *(_phase_row(phase) for phase in inputs.phases),
    ]
    return "\n".join(rows)


def _phase_row(phase: PhaseFacts) -> str:
    counts = (phase.num_steps, phase.batch_size, phase.num_images_seen)
    return _row([phase.name, phase.kind, phase.images, *(f"{count:,}" for count in counts)])


def _evaluation(evaluation: Mapping[str, Any] | None) -> str:
    if evaluation is None:
        return ""
    few = next((p["few_shot"] for p in evaluation["probes"] if p["few_shot"]), None)
    head = ["model", "features", "linear probe, %"]
    head += [f"{few['shots']} per class, %"] if few else []
    lines = ["## Evaluation", "", _row(head), "|---" * len(head) + "|"]
    for entry in evaluation["probes"]:
        cells = [entry["model"], entry["rule"], _accuracy(entry["linear_probe"])]
        lines.append(_row(cells + ([_accuracy(entry["few_shot"])] if few else [])))
    used = " ".join(
        f"{part['role'].capitalize()}: {part['num_images']:,} images of {part['name']}."
        for part in evaluation["images"]
    )
    draws = f" Few-shot: mean of {few['draws']} draws, 95 % t interval." if few else ""
    described = {p["rule"]: p["rule_description"] for p in evaluation["probes"]}
    lines += ["", f"{used} Seed {evaluation['seed']}. Probe: Wilson 95 % interval.{draws}", ""]
    lines += [f"- `{rule}`: {text}" for rule, text in described.items() if text != rule]
    if evaluation["losses"]:
        lines += ["", "| model | held-out loss | 95 % interval | images | norm_pix_loss |"]
        lines.append("|---" * 5 + "|")
        for loss in evaluation["losses"]:
            low, high = loss["interval"]
            cells = [loss["model"], f"{loss['loss']:.4f}", f"{low:.4f} to {high:.4f}"]
            images = f"{loss['num_images']:,} of {loss['images']}"
            switch = f"on ({loss['norm_pix_epsilon']:g})" if loss["norm_pix_loss"] else "off"
            lines.append(_row([*cells, images, switch]))
    return "\n".join(lines)


def _accuracy(result: Mapping[str, Any] | None) -> str:
    if result is None:
        return "—"
    accuracy = f"{100 * result['accuracy']:.1f}"
    if result["interval"] is None:
        return accuracy
    return accuracy + " [{:.1f}, {:.1f}]".format(*(100 * end for end in result["interval"]))


def _row(cells: list[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
