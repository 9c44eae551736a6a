"""Prepare a recipe's data sets on the Ray cluster this job runs on.

ray job submit --working-dir . -- python jobs/prepare.py RECIPE [--set PATH=VALUE ...]
"""

import click

from pipeline.chain.stages import claim, prepare_stage
from pipeline.chain.terminal import make_console, readable
from pipeline.cluster.local import connected


@click.command()
@click.argument("recipe")
@click.option("--set", "overrides", multiple=True)
@readable
def main(recipe: str, overrides: tuple[str, ...]) -> None:
    """Prepare every data set that is not prepared yet."""
    console = make_console()
    with connected():
        prepare_stage(claim(recipe, overrides, console), console, use_ray=True)


if __name__ == "__main__":
    main()
