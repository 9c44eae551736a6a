"""`dp-pretrain audit`: the training step under a recipe's own mechanisms, judged by canaries."""

from __future__ import annotations

import json

from rich.console import Console

from pipeline.audit import audit_mechanism, table_lines
from pipeline.chain.layout import RunLayout
from pipeline.plan import plan_recipe
from pipeline.recipe import Recipe, RecipeError
from pipeline.storage import Location


def audit_recipe(recipe: Recipe, console: Console, out: str | None, seed: int | None) -> bool:
    """Audits the mechanism of every private phase; no private picture is read.

    Args:
        out: JSON file; by default `audit.json` of the recipe's run, where its report looks.

    Returns:
        Whether everything passed.

    Raises:
        RecipeError: if the recipe has no private phase, or its N is not known.
    """
    layout = RunLayout(recipe)
    plans = [p for p in plan_recipe(recipe, layout.num_records()) if p.mechanism is not None]
    if not plans:
        raise RecipeError(f"recipe {recipe.name!r} has no private phase: there is nothing to audit")
    results = {}
    for plan in plans:
        privacy = recipe.phase(plan.name).privacy
        assert plan.mechanism is not None and privacy is not None
        console.print(f"audit of phase {plan.name}", style="bold")
        results[plan.name] = audit_mechanism(
            plan.mechanism,
            clipping=privacy.clipping,
            gamma=privacy.gamma,
            seed=seed,
            progress=lambda text: console.print(f"audit: {text}", style="dim"),
        )
        for line in table_lines(results[plan.name]):
            console.print(line)
    place = layout.audit if out is None else Location(out)
    place.write_text(json.dumps(results, indent=1) + "\n")
    if out is None:
        layout.report.delete()  # it is written anew, with this, by the next `run`
    console.print(f"Audit:    {place}")
    return all(result["passed"] for result in results.values())
