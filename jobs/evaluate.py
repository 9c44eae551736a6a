"""Evaluate a trained recipe, export its encoder and write the report.

ray job submit --working-dir . -- python jobs/evaluate.py RECIPE [--set PATH=VALUE ...]
"""

import click

from pipeline.chain.results import evaluate_stage, export_stage, report_stage
from pipeline.chain.stages import claim
from pipeline.chain.terminal import make_console, readable


@click.command()
@click.argument("recipe")
@click.option("--set", "overrides", multiple=True)
@readable
def main(recipe: str, overrides: tuple[str, ...]) -> None:
    """Judge the encoder on public labelled images; write export and report."""
    console = make_console()
    layout = claim(recipe, overrides, console)
    evaluate_stage(layout, console)
    export_stage(layout, console)
    report_stage(layout, console)


if __name__ == "__main__":
    main()
