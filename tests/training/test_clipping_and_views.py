"""What a recipe says of clipping and of views is what a step does: against the reference."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from phase_fixtures import (
    MODEL,
    NUM_RECORDS,
    Crash,
    crash_at,
    make_mechanism,
    make_phase,
    run,
    units,
)
from torch import Tensor

from pipeline.data.stream import StreamConfig, Unit
from pipeline.dpsgd import CompiledGradientSum, make_blocks, make_clipping, reference_clipped_sum
from pipeline.dpsgd.blocks import STYLES
from pipeline.models.mae import MaskedAutoencoder, normalise_images
from pipeline.privacy.keys import AttemptKey
from pipeline.privacy.sampling import record_uniforms
from pipeline.recipe import Privacy
from pipeline.storage import Location
from pipeline.training import gradients as gradients_module
from pipeline.training.checkpoint import latest_checkpoint, load_checkpoint
from pipeline.training.gradients import PrivateGradients, PublicGradients
from pipeline.training.metrics import PrivateLog
from pipeline.training.phase import _OpenPhase, build_model
from pipeline.training.settings import PhaseSettings

Make = Callable[..., PhaseSettings]
VIEWS, IMAGES, BOUND = 3, 4, 0.05


def private_phase(**privacy: Any) -> dict[str, Any]:
    promise = {"noise_multiplier": 1.0, "expected_batch_size": 24, "reserve_steps": 4}
    return {"views_per_image": VIEWS, "privacy": {**promise, "max_grad_norm": BOUND, **privacy}}


def settings_of(kind: str, **changes: Any) -> PhaseSettings:
    """Settings of a phase of which only the gradients are asked for."""
    phase = make_phase(kind, **changes)
    is_private = kind == "private"
    return PhaseSettings(
        run="some-run",
        phase=phase,
        model=MODEL,
        recipe_digest="0" * 64,
        mechanism=make_mechanism(phase, max_grad_norm=BOUND) if is_private else None,
        dataset_root="",
        held_out_root=None,
        output="",
        init_from=None,
        ledger_home="" if is_private else None,
        domain="some" if is_private else None,
    )


def batch(model: MaskedAutoencoder) -> tuple[Tensor, Tensor, Tensor]:
    """Views [M V, ...], mask uniforms [M V, T] and weights [M], in float64."""
    generator = torch.Generator().manual_seed(3)
    images = torch.randn(IMAGES * VIEWS, 3, 16, 16, dtype=torch.float64, generator=generator)
    images *= torch.logspace(-1, 1, IMAGES, dtype=torch.float64).repeat_interleave(VIEWS)[
        :, None, None, None
    ]
    uniforms = torch.rand(IMAGES * VIEWS, model.num_patches, generator=generator)
    return images, uniforms, torch.tensor([1.0, 1.0, 0.0, 1.0])


def mean_loss(
    model: MaskedAutoencoder, images: Tensor, uniforms: Tensor
) -> Callable[[int], Tensor]:
    """The loss of image i: the mean over its views, each computed by itself."""

    def loss(image: int) -> Tensor:
        rows = range(image * VIEWS, (image + 1) * VIEWS)
        return torch.cat([model(images[r : r + 1], uniforms[r : r + 1]) for r in rows]).mean()

    return loss


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("clipping", ["flat", "automatic", "global"])
def test_a_private_step_is_what_the_recipe_says(clipping: str, style: str) -> None:
    made = settings_of("private", **private_phase(clipping=clipping, clipping_style=style))
    model = build_model(MODEL).double()
    images, uniforms, weights = batch(model)
    assert made.mechanism is not None
    key = AttemptKey.seeded(0)
    plan = made.mechanism.plan(key.sampling_key(), num_records=NUM_RECORDS)
    gradients = PrivateGradients(model, made, plan, key, PrivateLog(None, ""))
    gradients._sums.zero_()
    gradients.accumulate(images, uniforms, weights)
    expected = reference_clipped_sum(
        model,
        mean_loss(model, images, uniforms),
        IMAGES,
        make_clipping(clipping, BOUND),
        weights,
        blocks=make_blocks(style, model),
    )
    gradients.close()
    factors_MK = expected.block_factors_MK[weights > 0]
    assert (factors_MK != 1).any()
    found = gradients._sums.flat_sum
    torch.testing.assert_close(found, expected.flat_sum_P, rtol=1e-9, atol=1e-12)
    if clipping != "global":
        assert found.any()


def test_a_compiled_step_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second microbatch is the first that runs compiled; here by a backend that is quick."""
    quick = partial(CompiledGradientSum, backend="eager")
    monkeypatch.setattr(gradients_module, "CompiledGradientSum", quick)
    sums = []
    for is_compiled in (False, True):
        compiles = {"resources": {"compile": is_compiled}}
        made = settings_of("private", **private_phase(clipping="flat"), **compiles)
        model = build_model(MODEL).double()
        images, uniforms, weights = batch(model)
        assert made.mechanism is not None
        key = AttemptKey.seeded(0)
        plan = made.mechanism.plan(key.sampling_key(), num_records=NUM_RECORDS)
        gradients = PrivateGradients(model, made, plan, key, PrivateLog(None, ""))
        gradients._sums.zero_()
        for rows in (images, images.flip(3)):
            gradients.accumulate(rows.contiguous(), uniforms, weights)
        sums.append(gradients._sums.flat_sum)
        assert bool(gradients._compiled and gradients._compiled._steps) == is_compiled
        gradients.close()
    assert sums[0].any()
    torch.testing.assert_close(sums[1], sums[0], rtol=1e-10, atol=1e-13)


def test_a_public_step_is_compiled_where_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[object] = []
    monkeypatch.setattr(torch, "compile", lambda model: compiled.append(model) or model)
    model = build_model(MODEL)
    for is_compiled in (False, True):
        made = settings_of("public", resources={"compile": is_compiled})
        PublicGradients(model, made, "public")
    assert compiled == [model]


def test_a_public_step_averages_the_views() -> None:
    made = settings_of("public", views_per_image=VIEWS)
    model = build_model(MODEL).double()
    images, uniforms, weights = batch(model)
    gradients = PublicGradients(model, made, "public")
    gradients.begin_step(0)
    gradients.accumulate(images, uniforms, weights)
    found = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
    loss = mean_loss(model, images, uniforms)
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    total = torch.stack([w * loss(i) for i, w in enumerate(weights.tolist())]).sum()
    expected = torch.autograd.grad(total, list(trained.values()))
    for (name, gradient), wanted in zip(found.items(), expected, strict=True):
        torch.testing.assert_close(gradient, wanted, rtol=1e-9, atol=1e-12, msg=name)
    assert gradients.public_loss() == pytest.approx(total.item() / 3)


@pytest.mark.parametrize("kind", ["public", "private"])
def test_a_phase_gives_each_image_its_views_and_masks(
    settings: Make, public_set: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """View 0 of an image, and its mask, are those of a phase without views."""
    seen: dict[int, list[tuple[Tensor, Tensor, Tensor]]] = {1: [], VIEWS: []}
    source = PublicGradients if kind == "public" else PrivateGradients
    accumulate = source.accumulate

    def watched(self: Any, images: Tensor, uniforms: Tensor, weights: Tensor) -> None:
        seen[self._settings.phase.views_per_image].append((images, uniforms, weights))
        accumulate(self, images, uniforms, weights)

    monkeypatch.setattr(source, "accumulate", watched)
    pinned: dict[str, Any] = {"seed": 7, "dataset_root": public_set}
    if kind == "private":
        pinned["domain"] = "public-some"
    for num_views in seen:
        own = {"run": f"run-{num_views}", "output": str(tmp_path / f"{num_views}")}
        outcome, _ = run(settings(kind, phase={"views_per_image": num_views}, **own, **pinned))
        assert outcome.finished == "complete"
    assert len(seen[1]) == len(seen[VIEWS]) > 6
    is_other_crop: list[bool] = []
    for one, several in zip(seen[1], seen[VIEWS], strict=True):
        images, uniforms, weights = several
        assert torch.equal(weights, one[2])
        assert torch.equal(images[::VIEWS], one[0]) and torch.equal(uniforms[::VIEWS], one[1])
        for row in torch.nonzero(weights).flatten().tolist():
            for view in range(1, VIEWS):
                is_other_crop.append(
                    not torch.equal(images[row * VIEWS + view], images[row * VIEWS])
                )
                assert not torch.equal(uniforms[row * VIEWS + view], uniforms[row * VIEWS])
    assert np.mean(is_other_crop) > 0.9  # of so few pixels two crops may be the same


def test_masks_are_functions_of_the_view(settings: Make) -> None:
    made = settings("private", phase={"views_per_image": 2})
    phase = _OpenPhase.__new__(_OpenPhase)
    phase.settings, phase.model = made, build_model(made.model)
    phase.augmentation_key = b"a" * 32
    ids = np.array([5, 9, -1])
    found = phase._mask_uniforms(7, ids)
    for view in range(2):
        expected = record_uniforms(
            b"a" * 32, 7, ids, "mask", num_values=phase.model.num_patches, view=view
        )
        assert (found[view::2] == expected).all()


@pytest.mark.parametrize("style", STYLES)
def test_phases_of_every_style_resume_to_the_same_weights(
    settings: Make, public_set: str, style: str, tmp_path: Path
) -> None:
    """In the seeded test mode, on a public set: blocks and views are the same after a resume."""
    phase = {"steps": 4, **private_phase(clipping_style=style, max_grad_norm=1.0)}
    pinned: dict[str, Any] = {"seed": 7, "dataset_root": public_set, "domain": "public-some"}
    found = []
    for name in ("straight", "broken"):
        made = settings("private", phase=phase, run=name, output=str(tmp_path / name), **pinned)
        if name == "broken":
            with pytest.raises(Crash):
                run(made, crash_at(3))
        outcome, _ = run(made)
        assert outcome.finished == "complete"
        latest = latest_checkpoint(Location(made.output))
        assert latest is not None
        found.append(load_checkpoint(latest).weights)
    assert all(torch.equal(value, found[1][name]) for name, value in found[0].items())


def test_blocks_of_the_masked_autoencoder() -> None:
    model = build_model(MODEL)
    encoder = [f"encoder.blocks.{i}" for i in range(model.size.depth)]
    decoder = [f"decoder_blocks.{i}" for i in range(model.size.decoder_depth)]
    found = make_blocks("per-block", model).members
    assert sorted(found) == sorted(["rest", *encoder, *decoder])
    assert {"encoder.cls_token", "mask_token", "decoder_pred.bias"} <= set(found["rest"])


def test_the_recipe_knows_the_engines_styles() -> None:
    assert Privacy.model_fields["clipping_style"].annotation.__args__ == STYLES  # type: ignore[union-attr]


def test_units_hold_the_views(settings: Make) -> None:
    """A unit of R rows has R V pictures; ids, weights and receipts are of images."""
    shapes: set[tuple[int, ...]] = set()

    def watched(config: StreamConfig) -> Any:
        unit: Unit
        for unit in units(config):
            shapes.add((len(unit.record_ids), *unit.images.shape))
            yield unit

    run(settings("private", phase={"views_per_image": VIEWS}), watched)
    assert shapes == {(16, 16 * VIEWS, 3, 16, 16)}


def test_normalising_keeps_views_apart() -> None:
    pictures = torch.randint(0, 255, (6, 3, 4, 4), dtype=torch.uint8)
    whole = normalise_images(pictures)
    assert torch.equal(whole[4], normalise_images(pictures[4:5])[0])
