"""Several encoders and the baselines, judged on public images: one table, ready for JSON.

Every number names its images, its seed, its interval and its rule; losses with and without
norm_pix_loss are never mixed without saying so.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pipeline.evaluation.held_out import held_out_loss
from pipeline.evaluation.probe import (
    few_shot,
    linear_probe,
    probe_classes,
    raw_pixel_features,
)
from pipeline.evaluation.stores import (
    ImageStore,
    assert_disjoint,
    require_public,
    subset,
    views,
)
from pipeline.models.mae import FEATURE_RULES, MaskedAutoencoder, normalise_images

RAW_PIXELS = "raw pixels"
RANDOM_ENCODER = "random encoder"


def evaluate_encoders(
    models: Mapping[str, MaskedAutoencoder],
    *,
    probe_store: ImageStore,
    score_store: ImageStore,
    private_stores: Sequence[ImageStore],
    held_out_store: ImageStore | None = None,
    rules: Sequence[str] = ("last_block",),
    shots: int = 10,
    draws: int = 5,
    seed: int = 0,
    max_images: int | None = None,
    max_held_out_images: int = 2_000,
    progress: Callable[[str], None] | None = None,
) -> dict[str, Any]:
    """Linear probe, few-shot accuracy and held-out loss of some models and of the baselines.

    Raw pixels and a random encoder (the first model's shape, weights drawn by `seed`) are always
    added; pass the warm-up alone as one of the models.

    Args:
        models: By the name that the table shows; all of one image size, each on its own device.
        probe_store: Labelled public images that the probe is fitted on.
        score_store: Other labelled public images, on which it is scored.
        private_stores: Every private set that any of the models has seen.
        held_out_store: Public images for the loss; `score_store` if None.
        rules: Some of `FEATURE_RULES`.
        shots: Labelled images per class of the few-shot score; 0 leaves it out.
        draws: How often they are drawn.
        seed: Decides draws, held-back images, subsets and the random encoder.
        max_images: Use a random subset of at most this many of each labelled set.
        max_held_out_images: The same for the loss.
        progress: Told what is being computed.
    Returns:
        JSON-ready: `probes` (one entry per model and rule, with `linear_probe` and `few_shot`),
        `losses`, `images` (what was used), `seed`.
    Raises:
        ValueError: a set that is not marked public or shares an image with a private one; the
            fitting and scoring sets sharing one; models of different image sizes; no labels.

    Guarantees:
        1. Nothing is scored on a private set or on an image of one
           (test_private_images_are_never_scored).
        2. The same inputs give the same table (test_the_same_inputs_give_the_same_table).
    """
    say = progress or (lambda _: None)
    held_out_store = score_store if held_out_store is None else held_out_store
    if not models:
        raise ValueError("models is empty: give at least one model to evaluate")
    image_sizes = {model.image_size for model in models.values()}
    if len(image_sizes) > 1:
        raise ValueError(f"models have image sizes {sorted(image_sizes)}: allowed is one size")
    for taken in (RAW_PIXELS, RANDOM_ENCODER):
        if taken in models:
            raise ValueError(f"models has {taken!r}, which is added anyway: use another name")
    say("checking that the evaluation images are public and in no private set")
    _refuse_private_images((probe_store, score_store, held_out_store), private_stores)
    _refuse_shared_images(probe_store, score_store)

    everyone = {RANDOM_ENCODER: _random_encoder(next(iter(models.values())), seed), **models}
    image_size = image_sizes.pop()
    features: list[dict[tuple[str, str], Tensor]] = []
    labels, used = [], []
    for role, store in (("fitted on", probe_store), ("scored on", score_store)):
        say(f"computing features of {store.manifest.name}")
        chosen = _labelled_ids(store, max_images, seed)
        found, kept = _features(everyone, rules, store, chosen, image_size)
        features.append(found)
        labels.append(store.labels(kept))
        unreadable = len(chosen) - len(kept)
        used.append(
            {
                "role": role,
                "name": store.manifest.name,
                "num_images": len(kept),
                "num_unreadable": unreadable,
            }
        )

    probes = []
    for name, rule in features[0]:
        say(f"probing {name}, {rule}")
        fit, score = features[0][name, rule], features[1][name, rule]
        probe = linear_probe(fit, labels[0], score, labels[1], rule=rule, seed=seed)
        few = None
        if shots:
            few = few_shot(
                fit, labels[0], score, labels[1], rule=rule, shots=shots, draws=draws, seed=seed
            )
        probes.append(
            {
                "model": name,
                "rule": rule,
                "rule_description": FEATURE_RULES.get(rule, rule),
                "linear_probe": _jsonable(probe),
                "few_shot": _jsonable(few) if few else None,
            }
        )
    losses = []
    for name, model in everyone.items():
        say(f"held-out loss of {name}")
        loss = held_out_loss(
            model, held_out_store, name=name, max_images=max_held_out_images, seed=seed
        )
        losses.append(_jsonable(loss))
    return {"probes": probes, "losses": losses, "images": used, "seed": seed}


def check_evaluation_sets(
    *,
    probe_store: ImageStore,
    score_store: ImageStore,
    private_stores: Sequence[ImageStore],
    shots: int,
    seed: int = 0,
    max_images: int | None = None,
) -> None:
    """Refuse, before anything is trained, sets that `evaluate_encoders` would refuse afterwards.

    Args and Raises: as there.
    """
    _refuse_private_images((probe_store, score_store), private_stores)
    _refuse_shared_images(probe_store, score_store)
    fitting, scoring = (
        store.labels(_labelled_ids(store, max_images, seed)) for store in (probe_store, score_store)
    )
    probe_classes(fitting, scoring, shots=max(shots, 1))


def format_results(results: Mapping[str, Any]) -> str:
    """The table of `evaluate_encoders` as text for a terminal."""
    fitted, scored = (part["num_images"] for part in results["images"])
    few = next((p["few_shot"] for p in results["probes"] if p["few_shot"]), None)
    headings = ["model", "features", "linear probe"]
    if few:
        headings.append(f"{few['shots']} per class")
    rows = [headings]
    for probe in results["probes"]:
        row = [probe["model"], probe["rule"], _percent(probe["linear_probe"])]
        rows.append([*row, _percent(probe["few_shot"])] if few else row)
    lines = [
        _aligned(rows),
        f"  {fitted} images fitted on, {scored} scored, seed {results['seed']}",
    ]
    lines[1] += "; probe: Wilson 95 % over the images"
    lines[1] += f"; few-shot: mean of {few['draws']} draws, 95 % t interval" if few else ""
    if results["losses"]:
        loss = results["losses"][0]
        entries = [
            [entry["model"], f"{entry['loss']:.4f}", "[{:.4f}, {:.4f}]".format(*entry["interval"])]
            for entry in results["losses"]
        ]
        lines.append("")
        lines.append(_aligned([["model", "held-out loss", "95 % interval"], *entries]))
        switch = f"on ({loss['norm_pix_epsilon']:g})" if loss["norm_pix_loss"] else "off"
        lines.append(f"  {loss['num_images']} images of {loss['images']}, norm_pix_loss {switch}")
    return "\n".join(lines)


def _refuse_private_images(
    scored: Sequence[ImageStore], private_stores: Sequence[ImageStore]
) -> None:
    named = [(store.manifest.name, store) for store in private_stores]
    for position, store in enumerate(scored):
        if any(store is earlier for earlier in scored[:position]):
            continue
        require_public(store)
        assert_disjoint(store.manifest.name, store, named)


def _refuse_shared_images(probe_store: ImageStore, score_store: ImageStore) -> None:
    """Fitting and scoring images must differ; both are public: the message may count them."""
    fitted = {digest.tobytes() for digest in probe_store.pixel_digests(None)}
    shared = sum(digest.tobytes() in fitted for digest in score_store.pixel_digests(None))
    if shared:
        raise ValueError(
            f"{probe_store.manifest.name!r} and {score_store.manifest.name!r} share {shared} "
            f"images: the score would count images that the probe was fitted on; use two splits"
        )


def _random_encoder(model: MaskedAutoencoder, seed: int) -> MaskedAutoencoder:
    """The same shape with fresh weights, on the same device."""
    fresh = copy.deepcopy(model).cpu()
    fresh.initialise(torch.Generator().manual_seed(seed))
    return fresh.to(model.mask_token.device)


def _labelled_ids(store: ImageStore, max_images: int | None, seed: int) -> npt.NDArray[np.int64]:
    labelled = np.flatnonzero(store.labels(np.arange(store.num_records)) >= 0)
    if not len(labelled):
        raise ValueError(
            f"evaluation set {store.manifest.name!r} has no labelled image: a probe needs labels "
            f"(of an imagefolder, its sub-folders); name a labelled set, or leave `evaluation` out"
        )
    return subset(labelled, max_images, seed)


def _features(
    models: Mapping[str, MaskedAutoencoder],
    rules: Sequence[str],
    store: ImageStore,
    ids: npt.NDArray[np.int64],
    image_size: int,
) -> tuple[dict[tuple[str, str], Tensor], npt.NDArray[np.int64]]:
    """Features_NF by (model, rule) of one set, raw pixels first, and the ids that were readable."""
    parts: dict[tuple[str, str], list[Tensor]] = {}
    pixels, kept = [], []
    for read_ids, images_M3HW in views(store, ids, image_size):
        kept.append(read_ids)
        pixels.append(images_M3HW)
        for name, model in models.items():
            inputs = normalise_images(images_M3HW.to(model.mask_token.device))
            for rule, features_MF in model.features_by_rule(inputs, rules).items():
                parts.setdefault((name, rule), []).append(features_MF.float().cpu())
    if not kept:
        raise ValueError(f"{store.manifest.name!r} has no readable labelled image")
    raw, raw_rule = raw_pixel_features(torch.cat(pixels))
    found = {(RAW_PIXELS, raw_rule): raw}
    found |= {key: torch.cat(features) for key, features in parts.items()}
    return found, np.concatenate(kept)


def _jsonable(result: Any) -> dict[str, Any]:
    return {k: list(v) if isinstance(v, tuple) else v for k, v in asdict(result).items()}


def _percent(result: Mapping[str, Any]) -> str:
    accuracy = f"{100 * result['accuracy']:5.1f}"
    if result["interval"] is None:
        return accuracy
    return accuracy + " [{:.1f}, {:.1f}]".format(*(100 * end for end in result["interval"]))


def _aligned(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)) for row in rows]
    lines.insert(1, "  ".join("─" * width for width in widths))
    return "\n".join("  " + line.rstrip() for line in lines)
