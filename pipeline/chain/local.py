"""The whole chain on this machine, one stage after the other."""

from __future__ import annotations

from rich.console import Console

from pipeline.chain.console import print_plan
from pipeline.chain.layout import RunLayout
from pipeline.chain.results import evaluate_stage, export_stage, report_stage
from pipeline.chain.stages import claim_checked, plan_stage, prepare_stage, train_stage
from pipeline.recipe import Recipe

_IMAGES_PER_SECOND = 1000.0


def run_here(recipe: Recipe, console: Console) -> RunLayout:
    """Prepare, train each phase, evaluate, export and report; what is done is not done again."""
    layout = claim_checked(recipe, console)
    if layout.is_complete():
        console.print(f"Run {layout.recipe.name} is complete. Report: {layout.report}")
        return layout
    prepare_stage(layout, console, use_ray=False)  # on one machine threads start sooner
    print_plan(console, plan_stage(layout), _IMAGES_PER_SECOND)
    for phase in layout.recipe.phases:
        if phase.resources.workers == 0 or layout.is_trained(phase.name):
            train_stage(layout, phase.name, console)
            continue
        # Only here: Ray takes seconds to import, and a phase in this process needs none of it.
        from pipeline.cluster.local import connected  # noqa: PLC0415
        from pipeline.training.workers import train_under_ray  # noqa: PLC0415

        with connected():
            train_stage(layout, phase.name, console, train_under_ray)
    evaluate_stage(layout, console)
    export_stage(layout, console)
    report_stage(layout, console)
    return layout


def prepare_here(recipe: Recipe, console: Console) -> None:
    """Prepare the data sets of a recipe with this machine's cores, and print the plan."""
    layout = claim_checked(recipe, console)
    prepare_stage(layout, console, use_ray=False)
    print_plan(console, plan_stage(layout), _IMAGES_PER_SECOND)
