"""What of a run is finished, told from the markers in storage."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from pipeline.chain.layout import RunLayout
from pipeline.privacy.composition import Charge, epsilon_of_charges
from pipeline.privacy.ledger import Ledger
from pipeline.privacy.mechanism import Mechanism
from pipeline.recipe import Phase
from pipeline.training.checkpoint import latest_checkpoint, read_facts


def print_status(console: Console, layout: RunLayout) -> None:
    """One line a stage, and what each private phase has paid."""
    table = Table(title=f"run {layout.recipe.name} in {layout.storage}", title_justify="left")
    table.add_column("stage")
    table.add_column("state")
    for stage, state in status_lines(layout):
        table.add_row(stage, state)
    console.print(table)


def status_lines(layout: RunLayout) -> list[tuple[str, str]]:
    """(stage, state) in order."""
    found = layout.manifests()
    lines = []
    for name in layout.recipe.data:
        for reference in layout.references(name):
            manifest = found.get(reference)
            state = f"done, {manifest.num_records:,} images" if manifest else "to do"
            lines.append((f"data {reference}", state))
    lines += [(f"phase {p.name}", _phase_state(layout, p.name)) for p in layout.recipe.phases]
    results = [
        ("evaluation", layout.evaluation, layout.is_evaluated()),
        ("export", layout.export, layout.is_exported()),
        ("report", layout.report, layout.report.exists()),
    ]
    for name, place, is_done in results:
        if name != "evaluation" or layout.recipe.evaluation is not None:
            state = f"done: {place}" if is_done else f"to do: {place} is not whole"
            lines.append((name, state if is_done or place.exists() else "to do"))
    return lines


def _phase_state(layout: RunLayout, name: str) -> str:
    phase = layout.recipe.phase(name)
    latest = latest_checkpoint(layout.phase(name))
    if latest is None:
        return "to do"
    facts = read_facts(latest)
    state = f"step {facts.step:,} of {phase.steps:,}"
    if facts.finished is not None:
        state = f"done ({facts.finished}), {state}"
    if phase.kind == "private" and facts.lineage:
        ledger = Ledger(layout.ledger_home, facts.lineage[-1]["domain"])
        spent = ledger.spent_by(layout.recipe.name, name)
        charged = sum(steps for _, steps in spent)
        state += f"; {charged:,} steps charged"
        if spent:
            epsilon = epsilon_of_charges([Charge(*each) for each in spent], spent[0][0].delta)
            state += f", epsilon {epsilon.value}"
        if facts.finished is None and spent:
            num = affordable_restarts(spent[0][0], phase, facts.step, charged)
            state += f"; its reserve affords {num} more restarts of the worst kind"
    return state


def affordable_restarts(mechanism: Mechanism, phase: Phase, step: int, charged: int) -> int:
    """Restarts that the reserve still pays for, each at its worst: two reservations (2K steps)."""
    unused = mechanism.max_charged_steps - charged - (phase.steps - step)
    worst = min(2 * phase.checkpoint_interval, phase.steps)
    return max(0, unused // worst)
