"""The stages of a run: prepare and train here; evaluate, export, report in results.py.

Each looks for its marker first, so that calling it again resumes it or does nothing.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from pipeline.chain.budgets import hold_to_budgets
from pipeline.chain.console import PhaseProgress, print_prepared
from pipeline.chain.descent import name_descendant
from pipeline.chain.layout import RunLayout, claim_run
from pipeline.chain.preflight import check_ledgers, check_places
from pipeline.chain.results import check_evaluation
from pipeline.data.manifest import DatasetManifest
from pipeline.data.prepare import PrepareProgress, close_idle_converters, prepare
from pipeline.data.shards import StorageFault
from pipeline.data.stream import StreamConfig, Unit, thread_pool_units
from pipeline.plan import PhasePlan, declared_num_records, plan_recipe
from pipeline.privacy.ledger import Ledger
from pipeline.privacy.mechanism import Mechanism
from pipeline.recipe import Phase, Recipe, load_recipe
from pipeline.storage import Location
from pipeline.training.checkpoint import read_facts
from pipeline.training.metrics import PublicMetrics
from pipeline.training.phase import PhaseOutcome, run_phase
from pipeline.training.ranks import Ranks, choose_device
from pipeline.training.settings import PhaseSettings

TrainUnderRay = Callable[[PhaseSettings, Callable[[PublicMetrics], None]], PhaseOutcome]


def claim(recipe_path: str, overrides: Sequence[str], console: Console) -> RunLayout:
    """The run of a recipe file, as `claim_checked` finds it.

    In a Ray job a relative `storage` would lie in the job's throw-away folder, so there it is taken
    below the home directory instead, and said.
    """
    recipe = load_recipe(
        recipe_path, overrides, lambda note: console.print(f"note: {note}", style="yellow")
    )
    place = Path(recipe.storage).expanduser()
    is_in_job = "RAY_JOB_CONFIG_JSON_ENV_VAR" in os.environ
    if is_in_job and "://" not in recipe.storage and not place.is_absolute():
        moved = str(Path.home() / "dp-pretrain" / place)
        console.print(f"storage {recipe.storage!r} is relative: this job uses {moved}")
        recipe = recipe.model_copy(update={"storage": moved})
    return claim_checked(recipe, console)


def claim_checked(recipe: Recipe, console: Console) -> RunLayout:
    """Refuse what cannot work before anything is made, then find or make the run."""
    check_places(RunLayout(recipe))
    layout = RunLayout(recipe)
    known = layout.num_records()
    read = [phase.data for phase in recipe.phases]
    if all(ref in known or declared_num_records(recipe, ref) is not None for ref in read):
        plan_recipe(recipe, known)
    try:
        claimed, note = claim_run(recipe)
    except OSError as error:
        raise ValueError(
            f"storage is {recipe.storage!r}: the run's folder cannot be written or read ({error}); "
            "mend its permissions, or give the run another name (--set name=…)"
        ) from None
    if note:
        console.print(f"note: {note}", style="yellow")
    check_ledgers(claimed)
    _refuse_lost_results(claimed)
    for name in claimed.changed_sources():
        console.print(
            f"note: files of data.{name}.source were added, removed, renamed or resized since it "
            f"was prepared; this run uses the prepared copy as it is: pictures withdrawn since are "
            f"still in it, new ones are not. To prepare anew: delete {claimed.dataset(name)} and "
            "give the run another name (what a ledger has charged stays charged)",
            style="yellow",
        )
    return claimed


def _refuse_lost_results(layout: RunLayout) -> None:
    """A finished run whose results are damaged is not trained again unasked."""
    if not layout.report.exists() or layout.is_complete():
        return
    lost = [p.name for p in layout.recipe.phases if not layout.is_trained(p.name)]
    if lost:
        raise ValueError(
            f"results of {layout.root} are missing or damaged, and so is the last checkpoint that "
            f"they are made from, in {layout.phase(lost[0])}: restore one or the other. To train "
            f"from the checkpoint before it, which spends reserve, delete {layout.report}"
        )


def prepare_stage(layout: RunLayout, console: Console, *, use_ray: bool) -> None:
    """Prepare every data set, public ones first: a private set leaves out what they hold."""
    data = layout.recipe.data
    for name in sorted(data, key=lambda name: data[name].visibility == "private"):
        destination = layout.dataset(name)
        try:
            with _preparing(console, name) as show:
                prepare(
                    layout.prepare_config(name),
                    destination,
                    show,
                    executor="ray" if use_ray else "threads",
                )
        except StorageFault as fault:
            if data[name].visibility == "public":
                raise StorageFault(f"{fault}: {fault.private_detail}") from None
            raise
        except ValueError as error:
            place = f"data.{name}." if str(error).startswith("source=") else f"data.{name}: "
            raise ValueError(f"{place}{error}") from None
        print_prepared(console, name, destination)
    close_idle_converters()
    check_evaluation(layout)
    _hold_to_budgets(layout, console)


def _hold_to_budgets(layout: RunLayout, console: Console) -> None:
    for change in hold_to_budgets(layout, plan_stage(layout)):
        console.print(f"note: {change}", style="yellow")


@contextmanager
def _preparing(console: Console, name: str) -> Iterator[Callable[[PrepareProgress], None]]:
    """A progress bar for prepare's two passes over its units."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.fields[records]} images"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(f"prepare {name}", total=None, records="0")

        def show(state: PrepareProgress) -> None:
            passes = 1 if state.stage == "writing" else 0
            share = (state.num_done / max(state.num_units, 1) + passes) / 2
            bar.update(task, total=1.0, completed=share, records=f"{state.num_records:,}")

        yield show


def plan_stage(layout: RunLayout) -> list[PhasePlan]:
    """The plan with the manifests' N, which rule over the recipe's."""
    return plan_recipe(layout.recipe, layout.num_records())


def phase_settings(layout: RunLayout, name: str) -> PhaseSettings:
    """What the ranks of a phase need to know.

    Raises:
        ValueError: if the data is not prepared, or the phase before is not finished.
    """
    recipe = layout.recipe
    phase = recipe.phase(name)
    root = layout.data_root(phase.data)
    if not DatasetManifest.exists(root):
        raise ValueError(f"phase {name}: {phase.data!r} is not prepared yet; run prepare first")
    plan = next(plan for plan in plan_stage(layout) if plan.name == name)
    is_private = phase.kind == "private"
    domain = layout.domain(phase) if is_private else None
    return PhaseSettings(
        run=recipe.name,
        phase=phase,
        model=recipe.model,
        recipe_digest=recipe.digest(),
        mechanism=_promised(layout, name, domain, plan.mechanism),
        dataset_root=str(root),
        held_out_root=str(layout.data_root(phase.held_out)) if phase.held_out else None,
        output=str(layout.phase(name)),
        init_from=_init_from(layout, name),
        ledger_home=layout.ledger_home if is_private else None,
        domain=domain,
        private_log=layout.private_log if is_private else None,
        seed=recipe.seed,
    )


def _promised(
    layout: RunLayout, phase: str, domain: str | None, planned: Mechanism | None
) -> Mechanism | None:
    """The mechanism that the ledger knows for a phase under way, else the planned one.

    A newer accounting library may calibrate the last digit of the noise differently; a phase keeps
    the noise it began with. Any other difference is left for the ledger to refuse.
    """
    if planned is None or domain is None:
        return None
    for account in Ledger(layout.ledger_home, domain).accounts():
        if (account.run, account.phase) == (layout.recipe.name, phase):
            begun = account.mechanism
            if begun == planned.with_noise(begun.noise_multiplier):
                return begun
    return planned


def _init_from(layout: RunLayout, name: str) -> str | None:
    """The checkpoint that a phase starts from, or None for fresh weights."""
    names = [phase.name for phase in layout.recipe.phases]
    init, position = layout.recipe.phase(name).init, names.index(name)
    if init == "fresh" or (init == "previous" and position == 0):
        return None
    if init != "previous":
        chosen = Location(init)
        if not read_facts(chosen).finished:
            raise ValueError(f"phases.{name}.init is {init!r}: that phase is not finished yet")
        return str(chosen)
    before = layout.finished_phase(names[position - 1])
    if before is None:
        raise ValueError(f"phase {name} starts from {names[position - 1]}, which is not finished")
    return str(before)


def train_stage(
    layout: RunLayout,
    name: str,
    console: Console,
    train_under_ray: TrainUnderRay | None = None,
) -> None:
    """Train one phase to its end, in this process (`workers: 0`) or on Ray Train workers."""
    settings = phase_settings(layout, name)
    phase = settings.phase

    show = PhaseProgress(console, name, phase.steps, settings.batch_size).tell
    if layout.finished_phase(name) is not None:
        _name_descendant(layout, phase)
        console.print(f"{name}: done")
        return
    if settings.mechanism is not None:
        _hold_to_budgets(layout, console)
    if phase.resources.workers == 0:
        outcome = _train_here(settings, show)
    else:
        assert train_under_ray is not None
        outcome = train_under_ray(settings, show)
    _name_descendant(layout, phase)
    layout.forget_results()
    if outcome.step < phase.steps:
        console.print(
            f"{name}: its reserve of steps for restarts is used up, so it ends early and validly "
            f"at step {outcome.step} of {phase.steps}",
            style="yellow",
        )


def _name_descendant(layout: RunLayout, phase: Phase) -> None:
    """A private phase's weights are in its ledger already; a public one's may descend from it."""
    made = layout.finished_phase(phase.name)
    if phase.kind == "public" and made is not None:
        name_descendant(layout.ledger_home, made)


def _train_here(settings: PhaseSettings, show: Callable[[PublicMetrics], None]) -> PhaseOutcome:
    resources = settings.phase.resources
    if resources.cpus_per_worker is not None:
        torch.set_num_threads(resources.cpus_per_worker)

    def open_units(config: StreamConfig) -> Iterator[Unit]:
        return thread_pool_units(config, 0, resources.data_cpus)

    return run_phase(settings, Ranks(choose_device(resources.device)), open_units, show)
