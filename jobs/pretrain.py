"""Train one phase of a recipe on the Ray cluster this job runs on.

ray job submit --working-dir . -- python jobs/pretrain.py RECIPE --phase NAME [--set PATH=VALUE ...]
"""

import click

from pipeline.chain.stages import claim, train_stage
from pipeline.chain.terminal import make_console, readable
from pipeline.cluster.local import connected
from pipeline.cluster.readiness import check_nodes
from pipeline.training.workers import train_under_ray


@click.command()
@click.argument("recipe")
@click.option("--phase", required=True)
@click.option("--set", "overrides", multiple=True)
@readable
def main(recipe: str, phase: str, overrides: tuple[str, ...]) -> None:
    """Train the phase from where it stands to its end."""
    console = make_console()
    with connected():
        layout = claim(recipe, overrides, console)
        check_nodes(str(layout.storage))
        train_stage(layout, phase, console, train_under_ray)


if __name__ == "__main__":
    main()
