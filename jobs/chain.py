"""The whole chain, public then private, each stage as its own Ray job.

    ray job submit --working-dir . -- python jobs/chain.py RECIPE [--set PATH=VALUE ...]

    prepare ─ phase 1 (public) ─ phase 2 (private) ─ … ─ evaluate, export, report

This job needs no GPU. A stage whose marker is in storage is skipped, a running one is followed, so
submitting the same recipe again resumes it and never runs anything twice.
"""

import shlex
from functools import partial

import click
from ray.job_submission import JobSubmissionClient

from pipeline.chain.stages import claim
from pipeline.chain.terminal import make_console, readable
from pipeline.cluster.jobs import Stage, follow_stage, parent_metadata, parent_runtime_env
from pipeline.cluster.local import require_authentication


@click.command()
@click.argument("recipe")
@click.option("--set", "overrides", multiple=True)
@readable
def main(recipe: str, overrides: tuple[str, ...]) -> None:
    """Run every stage of RECIPE in order."""
    require_authentication()
    console = make_console()
    layout = claim(recipe, overrides, console)
    chosen = [*overrides, f"storage={layout.storage}"]
    rest = shlex.join([recipe, *(word for override in chosen for word in ("--set", override))])
    stages = [
        Stage(
            name="prepare", entrypoint=f"python jobs/prepare.py {rest}", is_done=layout.is_prepared
        )
    ]
    for phase in layout.recipe.phases:
        command = f"python jobs/pretrain.py {rest} --phase {phase.name}"
        is_done = partial(layout.is_trained, phase.name)
        stages.append(Stage(name=phase.name, entrypoint=command, is_done=is_done))
    command = f"python jobs/evaluate.py {rest}"
    stages.append(Stage(name="evaluate", entrypoint=command, is_done=layout.is_complete))
    told = {"recipe_digest": layout.recipe.digest(), "storage": str(layout.storage)}
    metadata = told | parent_metadata()
    for stage in stages:
        follow_stage(
            JobSubmissionClient(),
            layout.recipe.name,
            stage,
            runtime_env=parent_runtime_env(),
            metadata=metadata,
            say=console.print,
        )
    console.print(f"All done. Report: {layout.report}")


if __name__ == "__main__":
    main()
