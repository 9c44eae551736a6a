"""What comes out of a run: the evaluation, the exported encoder with its statement, the report."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from rich.console import Console

from pipeline.chain.layout import RunLayout
from pipeline.data.shards import ShardStore
from pipeline.data.views import PixelReader, read_views
from pipeline.evaluation.evaluate import (
    check_evaluation_sets,
    evaluate_encoders,
    format_results,
)
from pipeline.models.export import encoder_files, export_encoder
from pipeline.models.mae import MaskedAutoencoder, reconstruction_pictures
from pipeline.models.sizes import model_size, parameter_count
from pipeline.plan import logical_batch_size
from pipeline.privacy.ledger import Ledger
from pipeline.privacy.sampling import record_uniforms
from pipeline.privacy.statement import LineageStep, build_statement, statement_text
from pipeline.recipe import Evaluation, Phase, Privacy, Recipe
from pipeline.report.card import model_card
from pipeline.report.facts import (
    MetricPoint,
    ModelFacts,
    PhaseFacts,
    Pictures,
    PrivacyFacts,
    ReportInputs,
)
from pipeline.report.render import render_report
from pipeline.training.checkpoint import Checkpoint, CheckpointFacts, load_checkpoint
from pipeline.training.phase import build_model


def evaluate_stage(layout: RunLayout, console: Console) -> None:
    """Probe the final encoder, the warm-up alone and the baselines on public labelled images."""
    evaluation = layout.recipe.evaluation
    if evaluation is None:
        console.print("evaluate: the recipe names no evaluation")
        return
    if not layout.is_evaluated():
        models = {name: _model(layout, saved) for name, saved in _judged(layout).items()}
        results = evaluate_encoders(
            models,
            **_evaluation_sets(layout, evaluation),
            rules=evaluation.rules,
            draws=evaluation.draws,
            progress=lambda text: console.print(f"evaluate: {text}", style="dim"),
        )
        layout.evaluation.write_text(json.dumps(results, indent=1))
    stored = read_evaluation(layout)
    if stored is not None:
        console.print(format_results(stored))


def check_evaluation(layout: RunLayout) -> None:
    """Refuse sets that cannot be scored, before anything is trained. Raises ValueError."""
    evaluation = layout.recipe.evaluation
    if evaluation is not None and not layout.is_evaluated():
        check_evaluation_sets(**_evaluation_sets(layout, evaluation))


def _evaluation_sets(layout: RunLayout, evaluation: Evaluation) -> dict[str, Any]:
    return {
        "probe_store": ShardStore(str(layout.data_root(evaluation.train))),
        "score_store": ShardStore(str(layout.data_root(evaluation.test))),
        "private_stores": [ShardStore(root) for root in layout.private_sets()],
        "shots": evaluation.shots,
        "seed": evaluation.seed,
        "max_images": evaluation.max_images,
    }


def read_evaluation(layout: RunLayout) -> dict[str, Any] | None:
    """The stored results, or None where nothing was evaluated."""
    return json.loads(layout.evaluation.read_text()) if layout.evaluation.exists() else None


def _judged(layout: RunLayout) -> dict[str, Checkpoint]:
    """The final weights, and those of the last public phase before a private one."""
    judged = {}
    phases = layout.recipe.phases
    for phase, following in pairwise(phases):
        if phase.kind == "public" and following.kind == "private":
            judged[f"{phase.name} alone"] = final_checkpoint(layout, phase.name)
    judged[f"after {phases[-1].name}"] = final_checkpoint(layout, phases[-1].name)
    return judged


def final_checkpoint(layout: RunLayout, phase: str) -> Checkpoint:
    """The last checkpoint of a finished phase. Raises ValueError if it is not finished."""
    location = layout.finished_phase(phase)
    if location is None:
        raise ValueError(f"phase {phase} of run {layout.recipe.name} is not finished")
    return load_checkpoint(location)


def _model(layout: RunLayout, saved: Checkpoint) -> MaskedAutoencoder:
    model = build_model(layout.recipe.model)
    model.load_state_dict(saved.weights)
    return model.eval()


def export_stage(layout: RunLayout, console: Console) -> None:
    """Write the timm directory, name it in the ledgers, and its privacy statement last."""
    marker = layout.export / "privacy.json"
    if not layout.is_exported():
        saved = final_checkpoint(layout, layout.recipe.phases[-1].name)
        model = _model(layout, saved)

        stamp: Any = {"tag": layout.recipe.name, "guarantee": saved.facts.guarantee}
        # The statement needs the weights' digest, the card the statement: the card comes second.
        bare = export_encoder(model, layout.export, **stamp, card_markdown="")
        statements = _statements(layout, saved.facts, bare.weights_digest)
        card = expected_card(layout, saved, statements)
        export_encoder(model, layout.export, **stamp, card_markdown=card)
        (layout.export / "PRIVACY.md").write_text(statements_text(statements))
        marker.write_text(json.dumps({"statements": statements}, indent=1))
    console.print(f"Encoder:  timm.create_model('local-dir:{layout.export}', pretrained=True)")
    for statement in json.loads(marker.read_text())["statements"]:
        console.print(_claim(statement), style="bold")


def expected_export(
    layout: RunLayout, saved: Checkpoint, statements: Sequence[Mapping[str, Any]]
) -> dict[str, bytes]:
    """What `export_stage` writes of a checkpoint and its statements, but for the model card."""
    files = encoder_files(
        _model(layout, saved),
        tag=layout.recipe.name,
        guarantee=saved.facts.guarantee,
        card_markdown="",
    )
    del files["README.md"]
    return {**files, "PRIVACY.md": statements_text(statements).encode()}


def expected_card(
    layout: RunLayout, saved: Checkpoint, statements: Sequence[Mapping[str, Any]]
) -> str:
    """The model card of a checkpoint and its statements.

    Raises:
        ValueError: the last checkpoint of a phase, its data or the evaluation, of which it tells,
            is gone.
    """
    if not layout.is_evaluated():
        raise ValueError(f"{layout.evaluation} is missing or damaged; run again")
    return model_card(_report_inputs(layout, saved, statements))


NO_LINEAGE_TEXT = (
    "# Privacy statement\n\nNo private record shaped these weights. What other phases of the run "
    "spent, if any, is in the ledger of their privacy domain.\n"
)


def statements_text(statements: Sequence[Mapping[str, Any]]) -> str:
    """The statements as Markdown for people, one after the other."""
    return "\n".join(statement_text(each) for each in statements) or NO_LINEAGE_TEXT


def _claim(statement: Mapping[str, Any]) -> str:
    """The promise in one line."""
    if not statement["is_private"]:
        return "Privacy:  NOT PRIVATE (seeded run)"
    epsilon = statement["epsilon"]
    own, run = epsilon["this_model"]["value"], epsilon["this_run"]["value"]
    domain = epsilon["domain"]
    total = domain if isinstance(domain, str) else domain["value"]
    return (
        f"Privacy:  epsilon {own} at delta {statement['delta']:.3g} for this model "
        f"({run} for all this run was charged, {total} for the domain "
        f"{statement['domain']!r} over all its runs)"
    )


def _statements(
    layout: RunLayout, facts: CheckpointFacts, weights_digest: str
) -> list[dict[str, Any]]:
    """One statement for each privacy domain that shaped the weights, which its ledger names."""
    statements = []
    for domain in dict.fromkeys(line["domain"] for line in facts.lineage):
        lines = [line for line in facts.lineage if line["domain"] == domain]
        ledger = Ledger(layout.ledger_home, domain)
        last = lines[-1]
        ledger.record_weights(
            run=last["run"],
            phase=last["phase"],
            step=last["num_steps"],
            digest=weights_digest,
            kind="export",
        )
        statements.append(state(layout, ledger, facts.lineage, weights_digest))
    return statements


def state(
    layout: RunLayout, ledger: Ledger, lineage: Sequence[Mapping[str, Any]], weights_digest: str
) -> dict[str, Any]:
    """The statement of a run's weights over the domain of `ledger`, as its entries give it."""
    return build_statement(
        ledger=ledger,
        run=layout.recipe.name,
        lineage=[
            LineageStep(run=line["run"], phase=line["phase"], num_steps=line["num_steps"])
            for line in lineage
            if line["domain"] == ledger.domain
        ],
        weights_digest=weights_digest,
        hyperparameter_search=layout.recipe.hyperparameter_search,
        public_data=[
            f"{name}: {manifest.origin or _kind(manifest.source)} ({manifest.num_records:,} images)"
            for name, manifest in layout.manifests().items()
            if manifest.visibility == "public"
        ],
        clipping={
            phase.name: clipping_in_words(phase, phase.privacy)
            for phase in layout.recipe.phases
            if phase.privacy is not None
        },
    )


def clipping_in_words(phase: Phase, privacy: Privacy) -> str:
    """How a private phase bounds what one image adds; the bound is the mechanism's clip."""
    rules = {
        "flat": "shortened to the clip where it is longer (flat)",
        "automatic": f"scaled to almost the clip (automatic, gamma {privacy.gamma:g})",
        "global": "dropped where it is longer than the clip (global)",
    }
    styles = {
        "all-layer": "over all parameters at once (all-layer)",
        "per-layer": "in every layer by itself, where the clip is that of the phase divided by the "
        "square root of the number of layers (per-layer)",
        "per-block": "in every block of layers by itself, where the clip is that of the phase "
        "divided by the square root of the number of blocks (per-block)",
    }
    num_views = phase.views_per_image
    mean = f" of its mean loss over {num_views} views" if num_views > 1 else ""
    return (
        f"an image's gradient{mean} is {rules[privacy.clipping]}, {styles[privacy.clipping_style]}"
    )


def _model_facts(layout: RunLayout) -> ModelFacts:
    config = layout.recipe.model
    count = parameter_count(model_size(config.size), config.image_size, config.patch_size)
    return ModelFacts(
        size=config.size,
        image_size=config.image_size,
        patch_size=config.patch_size,
        mask_ratio=config.mask_ratio,
        norm_pix_loss=config.norm_pix_loss,
        num_parameters=count.trainable,
        num_encoder_parameters=count.encoder,
    )


def _privacy_facts(
    layout: RunLayout, statements: Sequence[Mapping[str, Any]]
) -> list[PrivacyFacts]:
    targets = [p.privacy.target_epsilon for p in layout.recipe.phases if p.privacy is not None]
    target = targets[-1] if targets else None
    return [PrivacyFacts.from_statement(each, target_epsilon=target) for each in statements]


def report_stage(layout: RunLayout, console: Console) -> None:
    """Write the HTML report."""
    if not layout.report.exists():
        saved = final_checkpoint(layout, layout.recipe.phases[-1].name)
        statements = json.loads((layout.export / "privacy.json").read_text())["statements"]
        pictures = _pictures(layout, _model(layout, saved))
        inputs = replace(_report_inputs(layout, saved, statements), pictures=pictures)
        render_report(inputs, layout.report)
    console.print(f"Report:   {layout.report}")


def _report_inputs(
    layout: RunLayout, saved: Checkpoint, statements: Sequence[Mapping[str, Any]]
) -> ReportInputs:
    """What report and model card tell, without pictures."""
    recipe = layout.recipe
    return ReportInputs(
        run=recipe.name,
        guarantee=saved.facts.guarantee,
        model=_model_facts(layout),
        privacy=_privacy_facts(layout, statements),
        phases=[_phase_facts(layout, phase) for phase in recipe.phases],
        evaluation=read_evaluation(layout),
        audit=json.loads(layout.audit.read_text()) if layout.audit.exists() else None,
        pictures=None,
        statement_markdown=statements_text(statements),
        recipe_yaml=_published(recipe).to_yaml(),
    )


def _kind(source: str) -> str:
    """What a source is, without where it lies; a synthetic one is public in full."""
    return source if source.startswith("synthetic:") else f"{source.partition(':')[0]} images"


def _published(recipe: Recipe) -> Recipe:
    """The recipe as a report may show it: without the operator's places."""
    data = {
        name: dataset.model_copy(update={"source": _kind(dataset.source)})
        for name, dataset in recipe.data.items()
    }
    hidden = {"data": data, "storage": "(not shown)", "ledger_home": None, "private_storage": None}
    return recipe.model_copy(update=hidden)


def _phase_facts(layout: RunLayout, phase: Phase) -> PhaseFacts:
    facts = final_checkpoint(layout, phase.name).facts
    num_records = layout.num_records().get(phase.data)
    if num_records is None:
        raise ValueError(f"the prepared images of phases.{phase.name}.data, {phase.data}, are gone")
    return PhaseFacts(
        name=phase.name,
        kind=phase.kind,
        images=f"{phase.data} ({num_records:,} images)",
        held_out=phase.held_out,
        num_steps=facts.step,
        batch_size=logical_batch_size(phase, num_records),
        points=[MetricPoint(**line) for line in facts.history],
        ended="complete" if facts.finished == "complete" else "early: its reserve was used up",
    )


_NUM_PICTURES = 8


def _pictures(layout: RunLayout, model: MaskedAutoencoder) -> Pictures | None:
    """Reconstructions of public images: of the evaluation's, else of a held-out set."""
    evaluation = layout.recipe.evaluation
    held_out = [phase.held_out for phase in layout.recipe.phases if phase.held_out]
    named = [*held_out, *([evaluation.test] if evaluation is not None else [])]
    if not named:
        return None
    reference = named[-1]
    store = ShardStore(str(layout.data_root(reference)))
    if store.manifest.visibility != "public":
        raise ValueError(f"{reference} is not public: its pictures cannot be shown")
    ids = np.linspace(0, store.num_records - 1, _NUM_PICTURES).astype(np.int64)
    images, is_decoded = read_views(PixelReader(store, 0), ids, image_size=model.image_size)
    key = hashlib.sha256(b"masks of the report's pictures").digest()
    uniforms = record_uniforms(key, 0, ids, "mask", num_values=model.num_patches)
    original, masked, reconstructed = reconstruction_pictures(
        model, torch.from_numpy(images[is_decoded]), torch.from_numpy(uniforms[is_decoded])
    )
    return Pictures(source=reference, original=original, masked=masked, reconstructed=reconstructed)
