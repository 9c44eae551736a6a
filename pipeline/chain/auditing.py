"""`dp-pretrain audit`: the training step under a recipe's own mechanisms, judged by canaries."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from rich.console import Console

from pipeline.audit import audit_mechanism, membership_of_model, table_lines
from pipeline.chain.layout import RunLayout, find_run, open_run
from pipeline.chain.results import report_stage
from pipeline.data.shards import ShardStore
from pipeline.plan import plan_recipe
from pipeline.recipe import Recipe, RecipeError
from pipeline.storage import Location
from pipeline.training.checkpoint import load_checkpoint
from pipeline.training.metrics import PrivateLog
from pipeline.training.phase import build_model


def audit_recipe(recipe: Recipe, console: Console, out: str | None, seed: int | None) -> bool:
    """Audits the mechanism of every private phase, and the model of a run that has finished.

    The mechanism's audit reads no picture of any data set.

    Args:
        out: JSON file; by default `audit.json` of the recipe's run, whose report then tells of it.

    Returns:
        Whether everything passed.

    Raises:
        RecipeError: if the recipe has no private phase, or its N is not known.
    """
    layout = find_run(recipe)
    plans = [p for p in plan_recipe(recipe, layout.num_records()) if p.mechanism is not None]
    if not plans:
        raise RecipeError(f"recipe {recipe.name!r} has no private phase: there is nothing to audit")
    results = {}
    for plan in plans:
        phase = recipe.phase(plan.name)
        privacy = phase.privacy
        assert plan.mechanism is not None and privacy is not None
        console.print(f"audit of phase {plan.name}", style="bold")
        results[plan.name] = audit_mechanism(
            plan.mechanism,
            clipping=privacy.clipping,
            gamma=privacy.gamma,
            clipping_style=privacy.clipping_style,
            views_per_image=phase.views_per_image,
            seed=seed,
            progress=lambda text: console.print(f"audit: {text}", style="dim"),
        )
        for line in table_lines(results[plan.name]):
            console.print(line)
    place = layout.audit if out is None else Location(out)
    content = {"phases": results, "membership": _membership(layout, console, seed or 0)}
    place.write_text(json.dumps(content, indent=1) + "\n")
    console.print(f"Audit:    {place}")
    if out is None:
        _renew_report(layout, console)
    return all(result["passed"] for result in results.values())


def _renew_report(layout: RunLayout, console: Console) -> None:
    """A finished run's report is written again, with the audit, and is there whatever happens."""
    if not layout.is_complete():
        console.print("Report:   `dp-pretrain run` of this recipe writes it, with this audit in it")
        return
    finished = open_run(str(layout.root), str(layout.storage))  # by the recipe that was run
    before = finished.report.read_bytes()
    finished.report.delete()
    try:
        report_stage(finished, console)
    except BaseException:
        finished.report.write_bytes(before)
        raise


def _membership(layout: RunLayout, console: Console, seed: int) -> dict[str, Any]:
    """Membership inference on a finished run's model, by phase, for public data alone.

    A phase's members are attacked where another split of their data set trained nothing. What is
    found about private members goes to the private log; that it is there is all that is told.
    """
    phases = layout.recipe.phases
    final = layout.finished_phase(phases[-1].name)
    if final is None:
        return {}
    model = build_model(layout.recipe.model)
    model.load_state_dict(load_checkpoint(final).weights)
    model.eval()
    trained = {phase.data for phase in phases}
    shown: dict[str, Any] = {}
    for phase in phases:
        name = phase.data.partition(".")[0]
        others = [ref for ref in layout.references(name) if ref not in trained]
        if not others:
            continue
        members = ShardStore(str(layout.data_root(phase.data)))
        rest = ShardStore(str(layout.data_root(others[0])))
        scores = asdict(membership_of_model(model, members, rest, seed=seed))
        found = {"members": phase.data, "others": others[0], **scores}
        if members.manifest.is_private or rest.manifest.is_private:
            _keep_private(layout, phase.name, found, console)
            continue
        shown[phase.name] = found
        low, high = scores["intervals"]["auc"]
        console.print(
            f"membership of {phase.data} against {others[0]} (public), by the final model's loss: "
            f"AUC {scores['auc']:.3f} [{low:.3f}, {high:.3f}]"
        )
    return shown


def _keep_private(
    layout: RunLayout, phase: str, found: Mapping[str, Any], console: Console
) -> None:
    if layout.private_log is None:
        console.print(f"membership of phase {phase}: private, and there is no private log")
        return
    log = PrivateLog(Location(layout.private_log).local_path, f"{layout.recipe.name}-{phase}-audit")
    log.write(membership=found)
    log.close()
    console.print(f"membership of phase {phase}: in the private log, since its members are private")
