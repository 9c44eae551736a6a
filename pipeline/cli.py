"""`dp-pretrain`: the command line; thin, it calls the library."""

from __future__ import annotations

import click

from pipeline.chain.terminal import make_console, readable
from pipeline.recipe import Recipe, load_recipe
from pipeline.storage import checked_place

console = make_console()

_set = click.option(
    "--set",
    "overrides",
    multiple=True,
    metavar="PATH=VALUE",
    help="Change one recipe key, as in phases.private.privacy.target_epsilon=2.",
)


def _storage_place(context: click.Context, parameter: click.Parameter, value: str) -> str:
    try:
        return checked_place(value)
    except ValueError as error:
        raise click.BadParameter(str(error)) from None


_storage = click.option(
    "--storage",
    default="storage",
    show_default=True,
    callback=_storage_place,
    help="Where runs live.",
)


def _load(recipe: str, overrides: tuple[str, ...]) -> Recipe:
    return load_recipe(
        recipe, overrides, lambda note: console.print(f"note: {note}", style="yellow")
    )


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="dp-pretrain")
def main() -> None:
    """Differentially private pre-training of vision foundation models, on Ray."""


@main.command()
@click.argument("recipe")
@_set
@click.option(
    "--images-per-second",
    type=click.FloatRange(min=0, min_open=True),
    default=1000.0,
    show_default=True,
)
@click.option(
    "--solve",
    type=click.Choice(["steps", "batch", "noise"]),
    help="Print the most steps or the largest batch that target_epsilon allows at the recipe's "
    "noise_multiplier (each private phase must give both), or the least noise it needs.",
)
@readable
def plan(
    recipe: str, overrides: tuple[str, ...], images_per_second: float, solve: str | None
) -> None:
    """Print every derived number of RECIPE and refuse it if it costs more than its target."""
    from pipeline.chain.budgets import check_budgets
    from pipeline.chain.console import print_plan, print_solved
    from pipeline.chain.layout import RunLayout
    from pipeline.plan import plan_recipe, solve_recipe

    loaded = _load(recipe, overrides)
    layout = RunLayout(loaded)
    known = layout.num_records()
    if solve is not None:
        print_solved(console, solve_recipe(loaded, known, solve))
        return
    plans = plan_recipe(loaded, known, compare=True)
    print_plan(console, plans, images_per_second)
    check_budgets(layout, plans)


@main.command()
@click.argument("recipe")
@_set
@readable
def prepare(recipe: str, overrides: tuple[str, ...]) -> None:
    """Prepare the data sets of RECIPE and stop there."""
    from pipeline.chain.local import prepare_here

    prepare_here(_load(recipe, overrides), console)


@main.command()
@click.argument("recipe")
@_set
@readable
def run(recipe: str, overrides: tuple[str, ...]) -> None:
    """Run all of RECIPE on this machine; the same command again resumes."""
    from pipeline.chain.local import run_here

    run_here(_load(recipe, overrides), console)


_address = click.option(
    "--address",
    envvar="RAY_API_SERVER_ADDRESS",
    required=True,
    metavar="URL",
    help="Of the cluster's dashboard, as in http://127.0.0.1:8265.",
)


@main.command()
@click.argument("recipe")
@_set
@_address
@click.option(
    "--shared-paths", is_flag=True, help="Every node mounts the recipe's local paths, as they are."
)
@readable
def submit(recipe: str, overrides: tuple[str, ...], address: str, shared_paths: bool) -> None:
    """Run all of RECIPE on a Ray cluster; the same command again attaches, or resumes."""
    from pipeline.cluster.submission import open_client, submit_chain

    loaded = _load(recipe, overrides)
    done = submit_chain(open_client(address), address, loaded, has_shared_paths=shared_paths)
    console.print(f"job {done.job}: {'runs already' if done.is_attached else 'submitted'}")
    for verb in ("status", "logs", "cancel"):
        console.print(f"  dp-pretrain {verb} {loaded.name} --address {address}")


@main.command()
@click.argument("run_name", metavar="RUN")
@_address
@click.option("--stage", default="chain", show_default=True, help="prepare, a phase, evaluate.")
@readable
def logs(run_name: str, address: str, stage: str) -> None:
    """Print what RUN's chain, or one of its stages, printed on the cluster, until it ends."""
    from pipeline.cluster.submission import log_of, open_client

    for text in log_of(open_client(address), run_name, stage):
        click.echo(text, nl=False)


@main.command()
@click.argument("run_name", metavar="RUN")
@_address
@readable
def cancel(run_name: str, address: str) -> None:
    """Stop RUN on the cluster; what is charged stays charged, and `submit` resumes."""
    from pipeline.cluster.submission import cancel_run, open_client

    ended = cancel_run(open_client(address), run_name, console.print)
    for job, state in ended.items():
        console.print(f"job {job}: {state.value.lower()}")
    if not ended:
        console.print(f"run {run_name}: none of its jobs is running")


@main.command()
@click.argument("run_name", metavar="RUN")
@_storage
@click.option("--address", metavar="URL", help="Tell of its jobs on this cluster, too.")
@readable
def status(run_name: str, storage: str, address: str | None) -> None:
    """Tell what of RUN is finished."""
    from pipeline.chain.layout import open_run
    from pipeline.chain.status import print_status

    if address is None:
        print_status(console, open_run(run_name, storage))
        return
    from pipeline.cluster.submission import chain_storage, job_lines, jobs_of, open_client

    client = open_client(address)
    jobs = jobs_of(client, run_name)
    for job, state in job_lines(client, jobs):
        console.print(f"job {job}: {state}")
    place = chain_storage(jobs) or storage
    try:
        print_status(console, open_run(run_name, place))
    except (OSError, ValueError) as error:
        console.print(f"{place} cannot be read from here, so no more is known: {error}")


@main.command()
@click.argument("recipe")
@_set
@click.option("--out", metavar="FILE", help="Write the JSON here, and not beside the run.")
@click.option("--seed", type=int, help="Pin the audit's coins, to repeat it.")
@readable
def audit(recipe: str, overrides: tuple[str, ...], out: str | None, seed: int | None) -> None:
    """Attack the training step under RECIPE's own mechanisms, with canaries; exit 1 if it fails."""
    from pipeline.chain.auditing import audit_recipe

    if not audit_recipe(_load(recipe, overrides), console, out, seed):
        raise SystemExit(1)


@main.group()
def privacy() -> None:
    """What was spent on private pictures, and whether a run's claims are true."""


@privacy.command()
@click.argument("run_or_domain", metavar="RUN_OR_DOMAIN")
@_storage
@click.option("--ledger-home", metavar="PLACE", help="Where a domain's ledger is, if not there.")
@readable
def show(run_or_domain: str, storage: str, ledger_home: str | None) -> None:
    """Print what all runs over a privacy domain have paid: of each domain that RUN reads, or of
    the DOMAIN itself (a run of the same name goes first, unless --ledger-home is given)."""
    from pipeline.chain.console import print_ledger
    from pipeline.chain.layout import open_ledgers

    for ledger in open_ledgers(run_or_domain, storage, ledger_home):
        print_ledger(console, ledger)


@privacy.command()
@click.argument("run_or_domain", metavar="RUN_OR_DOMAIN")
@_storage
@click.option("--ledger-home", metavar="PLACE", help="Where a domain's ledger is, if not there.")
@click.option("--who", required=True, help="Who reads them.")
@click.option("--reason", required=True, help="What for.")
@click.confirmation_option(
    prompt="This cannot be undone: all later statements say UNBOUNDED. Go on?"
)
@readable
def unprotected(
    run_or_domain: str, storage: str, ledger_home: str | None, who: str, reason: str
) -> None:
    """Record, before it happens, that the pictures of a privacy domain are read without
    protection: by a person, or by a program that gives no guarantee."""
    from pipeline.chain.layout import open_ledgers

    for ledger in open_ledgers(run_or_domain, storage, ledger_home):
        head = ledger.record_unprotected(who, "outside dp-pretrain", reason)
        console.print(
            f"domain {ledger.domain}: recorded as entry {head.index}; its total is UNBOUNDED"
        )


@privacy.command()
@click.argument("run_name", metavar="RUN")
@_storage
@readable
def verify(run_name: str, storage: str) -> None:
    """Recompute all that RUN claims from its ledger's entries; exit code 1 if it is not so."""
    from pipeline.chain.layout import open_run
    from pipeline.chain.verification import verify_run

    for sentence in verify_run(open_run(run_name, storage)):
        console.print(f"ok  {sentence}")
    console.print("verified", style="bold")


if __name__ == "__main__":
    main()
