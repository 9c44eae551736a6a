"""What a report and a model card tell: public facts of a run, as plain dataclasses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

DIFFERENTIAL_PRIVACY = "differential privacy"
PUBLIC_DATA_ONLY = "none needed (public data)"


@dataclass(frozen=True, kw_only=True)
class MetricPoint:
    """Public metrics of one checkpoint.

    Args:
        step: Logical steps done.
        learning_rate: Of the last step.
        epsilon: Charged to the run so far; None in a public phase.
        images_per_second: Batch size x steps / seconds of the window, to two digits; public phases
            only.
        held_out_loss: On images marked public; None where the recipe names none.
        train_loss: Of the window; public phases only.
    """

    step: int
    learning_rate: float
    epsilon: float | None
    images_per_second: float | None
    held_out_loss: float | None
    train_loss: float | None = None

    def __post_init__(self) -> None:
        if self.images_per_second is not None:
            object.__setattr__(self, "images_per_second", float(f"{self.images_per_second:.2g}"))


@dataclass(frozen=True, kw_only=True)
class PhaseFacts:
    """One phase of training.

    Args:
        name: Its name in the recipe.
        kind: Public or private.
        images: What it trained on, in words.
        held_out: Whose held-out loss the points show, in words; None for none.
        num_steps: Logical steps done.
        batch_size: Expected images per step (B).
        points: One per checkpoint, in order.
        ended: How it ended, in words.
    Raises:
        ValueError: a private phase with a training loss or a speed, or a public one with an
            epsilon.

    Guarantees:
        1. The training loss and the speed of a private phase cannot be told
           (test_private_losses_are_not_reported).
    """

    name: str
    kind: Literal["public", "private"]
    images: str
    held_out: str | None
    num_steps: int
    batch_size: int
    points: Sequence[MetricPoint]
    ended: str = "complete"

    def __post_init__(self) -> None:
        for field in ("train_loss", "images_per_second") if self.kind == "private" else ():
            if any(getattr(point, field) is not None for point in self.points):
                raise ValueError(
                    f"phase {self.name!r} is private and has a {field}: what tells of private "
                    f"images belongs in the private log; leave it out"
                )
        if self.kind == "public" and any(p.epsilon is not None for p in self.points):
            raise ValueError(f"phase {self.name!r} is public and has an epsilon: leave it out")

    @property
    def num_images_seen(self) -> int:
        """Expected images over all steps, repetitions counted."""
        return self.num_steps * self.batch_size

    @property
    def images_per_second(self) -> float | None:
        """Median over the windows; None in a private phase and before the first checkpoint."""
        speeds = [p.images_per_second for p in self.points if p.images_per_second is not None]
        return float(np.median(speeds)) if speeds else None


@dataclass(frozen=True, kw_only=True)
class ModelFacts:
    """The architecture.

    Args:
        size: Its name.
        image_size: Pixels of a side.
        patch_size: Pixels of a patch's side.
        mask_ratio: Part of the patches hidden in training.
        norm_pix_loss: Whether patches were normalised in the loss.
        num_parameters: Trainable parameters, encoder and decoder.
        num_encoder_parameters: Of the encoder alone.
    """

    size: str
    image_size: int
    patch_size: int
    mask_ratio: float
    norm_pix_loss: bool
    num_parameters: int
    num_encoder_parameters: int


@dataclass(frozen=True, kw_only=True)
class PrivacyFacts:
    """What one privacy domain has paid, in the numbers of its statement.

    Args:
        domain: Its name.
        epsilon: Of the steps that led to this model; None if the run has no guarantee.
        run_epsilon: Of everything this run paid for; None if the run has no guarantee.
        domain_epsilon: Of all runs over the domain; None if unbounded.
        delta: Of all three.
        accountant: Which bound was the smaller, and its version.
        unit: What is protected, in words.
        num_records: N; None where it is private.
        sampling_probability: q.
        expected_batch_size: B.
        num_steps: Steps that led to the model.
        noise_multiplier: Noise standard deviation / max_grad_norm.
        max_grad_norm: Bound on what one image adds.
        target_epsilon: What the run may reach; None if the recipe gave the noise instead.
    """

    domain: str
    epsilon: float | None
    run_epsilon: float | None
    domain_epsilon: float | None
    delta: float
    accountant: str
    unit: str
    num_records: int | None
    sampling_probability: float
    expected_batch_size: int
    num_steps: int
    noise_multiplier: float
    max_grad_norm: float
    target_epsilon: float | None = None

    @classmethod
    def from_statement(
        cls, statement: Mapping[str, Any], *, target_epsilon: float | None = None
    ) -> PrivacyFacts:
        """The numbers of a statement of pipeline/privacy/statement.py (its last private phase)."""
        last = statement["phases"][-1]
        mechanism = last["mechanism"]
        found = {
            name: value["value"] if isinstance(value, Mapping) else None
            for name, value in statement["epsilon"].items()
        }
        return cls(
            domain=statement["domain"],
            epsilon=found["this_model"],
            run_epsilon=found["this_run"],
            domain_epsilon=found["domain"],
            delta=statement["delta"],
            accountant=f"{statement['accountant']['name']}, {statement['accountant']['version']}",
            unit=statement["privacy_unit"]["meaning"],
            num_records=mechanism["num_records"],
            sampling_probability=mechanism["sampling_probability"],
            expected_batch_size=mechanism["expected_batch_size"],
            num_steps=sum(phase["num_steps"] for phase in statement["phases"]),
            noise_multiplier=mechanism["noise_multiplier"],
            max_grad_norm=mechanism["max_grad_norm"],
            target_epsilon=target_epsilon,
        )


@dataclass(frozen=True, kw_only=True)
class Pictures:
    """Reconstructions of public images.

    Args:
        source: Which public set they come from, in words.
        original: uint8 [n, H, W, 3].
        masked: The same with hidden patches grey.
        reconstructed: The same with hidden patches filled in by the model.
    Raises:
        ValueError: if the three are not uint8 of one shape.
    """

    source: str
    original: npt.NDArray[np.uint8]
    masked: npt.NDArray[np.uint8]
    reconstructed: npt.NDArray[np.uint8]

    def __post_init__(self) -> None:
        for name in ("original", "masked", "reconstructed"):
            pictures = getattr(self, name)
            shape = pictures.shape
            if pictures.dtype != np.uint8 or shape != self.original.shape or shape[3:] != (3,):
                raise ValueError(
                    f"{name} is {pictures.dtype} {shape}: allowed is uint8 [n, H, W, 3], equal for "
                    f"original, masked and reconstructed"
                )


@dataclass(frozen=True, kw_only=True)
class ReportInputs:
    """Everything a report shows.

    Args:
        run: Name of the run.
        guarantee: How the weights are stamped: `DIFFERENTIAL_PRIVACY`, `PUBLIC_DATA_ONLY`, or
            anything else, which the page shows as a warning.
        model: The architecture.
        privacy: One entry per privacy domain that shaped the weights.
        phases: In the order of training.
        evaluation: The results of `evaluate_encoders`; None if nothing was evaluated.
        audit: The results of `dp-pretrain audit`; None if there was none.
        pictures: Reconstructions; None for none.
        statement_markdown: The privacy statement.
        recipe_yaml: The resolved recipe.
        export: Where the encoder was written; None if it was not.
        created: Date in words; None leaves it out, and equal inputs give equal pages.
    """

    run: str
    guarantee: str
    model: ModelFacts
    privacy: Sequence[PrivacyFacts]
    phases: Sequence[PhaseFacts]
    evaluation: Mapping[str, Any] | None
    pictures: Pictures | None
    statement_markdown: str
    recipe_yaml: str
    audit: Mapping[str, Any] | None = None
    export: str | None = None
    created: str | None = None

    @property
    def is_private(self) -> bool:
        """Whether a guarantee of differential privacy is claimed."""
        return self.guarantee == DIFFERENTIAL_PRIVACY


BASELINES = ("raw pixels", "random encoder")


def trained_probes(evaluation: Mapping[str, Any] | None) -> list[Mapping[str, Any]]:
    """Probe entries of the last model of the table: the one that the run ended with."""
    if evaluation is None:
        return []
    probes = [p for p in evaluation["probes"] if p["model"] not in BASELINES]
    return [p for p in probes if p["model"] == probes[-1]["model"]]


def best_probe(probes: Sequence[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """The entry with the highest linear probe accuracy; None for no entries."""
    return max(probes, key=lambda p: p["linear_probe"]["accuracy"], default=None)
