"""What comes out of a run: the evaluation, the exported encoder with its statement, the report."""

from __future__ import annotations

import json
from typing import Any

from rich.console import Console

from pipeline.chain.layout import RunLayout
from pipeline.data.shards import ShardStore
from pipeline.evaluation.evaluate import evaluate_encoders, format_results
from pipeline.models.mae import MaskedAutoencoder
from pipeline.storage import Location
from pipeline.training.checkpoint import Checkpoint, load_checkpoint
from pipeline.training.phase import build_model


def evaluate_stage(layout: RunLayout, console: Console) -> None:
    """Probe the final encoder, the warm-up alone and the baselines on public labelled images."""
    evaluation = layout.recipe.evaluation
    if evaluation is None:
        console.print("evaluate: the recipe names no evaluation")
        return
    if not layout.evaluation.exists():
        models = {name: _model(layout, saved) for name, saved in _judged(layout).items()}
        private = [
            ShardStore(str(layout.data_root(reference)))
            for name, dataset in layout.recipe.data.items()
            if dataset.visibility == "private"
            for reference in layout.references(name)
        ]
        results = evaluate_encoders(
            models,
            probe_store=ShardStore(str(layout.data_root(evaluation.train))),
            score_store=ShardStore(str(layout.data_root(evaluation.test))),
            private_stores=private,
            rules=evaluation.rules,
            shots=evaluation.shots,
            draws=evaluation.draws,
            seed=evaluation.seed,
            max_images=evaluation.max_images,
            progress=lambda text: console.print(f"evaluate: {text}", style="dim"),
        )
        layout.evaluation.write_text(json.dumps(results, indent=1))
    console.print(format_results(read_evaluation(layout)), style="bold")


def read_evaluation(layout: RunLayout) -> dict[str, Any] | None:
    """The stored results, or None where nothing was evaluated."""
    return json.loads(layout.evaluation.read_text()) if layout.evaluation.exists() else None


def _judged(layout: RunLayout) -> dict[str, Checkpoint]:
    """The final weights, and those of the last public phase before a private one."""
    judged = {}
    phases = layout.recipe.phases
    for phase, following in zip(phases, phases[1:], strict=False):
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
    """Write the timm directory, name it in the ledgers, then write its privacy statement."""
    marker = layout.export / "privacy.json"
    if not marker.exists():
        recipe = layout.recipe
        saved = final_checkpoint(layout, recipe.phases[-1].name)
        facts = saved.facts
        encoder = export_encoder(
            _model(layout, saved),
            layout.export,
            tag=recipe.name,
            guarantee=facts.guarantee,
            card_markdown="",
        )
        statements = _statements(layout, facts, encoder.weights_digest)
        text = "\n".join(statement_text(statement) for statement in statements)
        (layout.export / "PRIVACY.md").write_text(text or _PUBLIC_ONLY)
        card = _card(layout, statements)
        (layout.export / "README.md").write_text(card)
        marker.write_text(json.dumps({"statements": statements}, indent=1))
    console.print(f"encoder: timm.create_model('local-dir:{layout.export}', pretrained=True)")


_PUBLIC_ONLY = "# Privacy statement\n\nTrained on public data only; no private record was read.\n"


def _statements(
    layout: RunLayout, facts: CheckpointFacts, weights_digest: str
) -> list[dict[str, Any]]:
    """One statement for each privacy domain that shaped the weights."""
    public = [
        f"{name}: {manifest.origin or manifest.source} ({manifest.num_records:,} images)"
        for name, manifest in layout.manifests().items()
        if manifest.visibility == "public"
    ]
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
        statements.append(
            build_statement(
                ledger=ledger,
                run=layout.recipe.name,
                lineage=[
                    LineageStep(run=line["run"], phase=line["phase"], num_steps=line["num_steps"])
                    for line in lines
                ],
                weights_digest=weights_digest,
                hyperparameter_search=layout.recipe.hyperparameter_search,
                public_data=public,
            )
        )
    return statements
