"""What a person sees in the terminal: the plan, progress, the result. Public facts only."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import timedelta

from rich.console import Console
from rich.table import Table

from pipeline.data.prepare import SUMMARY_NAME, read_summary
from pipeline.plan import PhasePlan
from pipeline.privacy.accountant import epsilon_of
from pipeline.privacy.composition import epsilon_of_charges
from pipeline.privacy.ledger import Ledger, LedgerReport, PhaseAccount
from pipeline.privacy.mechanism import Mechanism
from pipeline.storage import Location
from pipeline.training.metrics import PublicMetrics, two_digits

_MIN_SECONDS = 0.1  # lines that come together, as when a phase is resumed, tell no rate


def print_plan(console: Console, plans: Sequence[PhasePlan], images_per_second: float) -> None:
    """The plan, one table a phase."""
    for plan in plans:
        table = Table(title=f"phase {plan.name} ({plan.kind})", title_justify="left", box=None)
        table.add_column(style="dim")
        table.add_column()
        for label, value in plan_lines(plan, images_per_second):
            table.add_row(label, value)
        console.print(table)
        for note in plan.notes:
            console.print(f"  note: {note}", style="yellow", highlight=False)
        console.print()


def print_solved(console: Console, solved: Sequence[tuple[str, Mechanism]]) -> None:
    """What a target allows, one line a phase."""
    for phase, mechanism in solved:
        cost = epsilon_of([(mechanism, mechanism.max_charged_steps)], mechanism.delta)
        console.print(
            f"phase {phase}: steps {mechanism.num_steps:,}, expected batch "
            f"{mechanism.expected_batch_size:,}, noise multiplier {mechanism.noise_multiplier:g} "
            f"cost epsilon {cost.value} by {cost.accountant} at delta {cost.delta:.3g} "
            f"({mechanism.reserve_steps:,} reserve steps included)"
        )


def plan_lines(plan: PhasePlan, images_per_second: float) -> list[tuple[str, str]]:
    """The plan as (label, value) pairs."""
    assumed = f" (assumed: {plan.assumed}; not prepared yet)" if plan.assumed else ""
    lines = [
        ("records N", f"{plan.num_records:,}{assumed}"),
        ("logical batch B", f"{plan.batch_size:,}" + (" (expected)" if plan.mechanism else "")),
        ("steps T", f"{plan.num_steps:,}"),
    ]
    if plan.mechanism is not None and plan.epsilon and plan.epsilon_without_reserve:
        mechanism, spent = plan.mechanism, plan.epsilon
        bare = plan.epsilon_without_reserve
        total = mechanism.num_steps + mechanism.reserve_steps
        lines += [
            ("sampling probability q", f"{mechanism.sampling_probability:.6g}"),
            ("noise multiplier", f"{mechanism.noise_multiplier:.10g}"),
            ("clip (max_grad_norm)", f"{mechanism.max_grad_norm:g}"),
            ("delta", f"{mechanism.delta:.3g}"),
            (
                f"epsilon, {total:,} steps",
                f"{spent.value} by {spent.accountant}  (PLD {spent.pld}, RDP {spent.rdp})",
            ),
            (
                "reserve",
                f"{mechanism.reserve_steps:,} steps for restarts (affords {plan.num_restarts} of "
                f"the worst kind); without using them epsilon is {bare.value}",
            ),
        ]
        if plan.calibrated:
            pld, rdp = plan.calibrated["pld"], plan.calibrated["rdp"]
            lines.append(
                (
                    "calibrated by",
                    f"PLD: noise multiplier {pld:.4f}; RDP: {rdp:.4f} "
                    f"(PLD needs {100 * (1 - pld / rdp):.1f} % less noise)",
                )
            )
        lines.append(("expected coverage", f"{plan.coverage:.1%} of the records at least once"))
    else:
        lines.append(("epochs", f"{plan.num_images / plan.num_records:.1f}"))
    lines += [
        ("peak learning rate", f"{plan.learning_rate:.4g}"),
        ("images seen", f"{plan.num_images:,}"),
        ("memory per microbatch", f"about {plan.memory_bytes / 2**30:.2f} GiB per worker"),
        ("time", f"{plan.hours(images_per_second):,.2f} h at {images_per_second:,.0f} images/s"),
    ]
    return lines


class PhaseProgress:
    """Lines about a phase, one for each checkpoint, with images/s and the time that is left.

    Both come from when the lines appeared here and the *expected* batch: whoever reads them could
    time them as well. They are kept nowhere.
    """

    def __init__(self, console: Console, phase: str, num_steps: int, batch_size: int) -> None:
        self._console, self._phase, self._num_steps = console, phase, num_steps
        self._batch_size = batch_size
        self._told: tuple[int, float] | None = None

    def tell(self, metrics: PublicMetrics) -> None:
        """Print the line of a checkpoint."""
        now, line = time.monotonic(), progress_line(self._phase, self._num_steps, metrics)
        step, then = self._told or (metrics.step, now)
        self._told = (metrics.step, now)
        if metrics.step > step and now - then > _MIN_SECONDS:
            rate = two_digits((metrics.step - step) * self._batch_size / (now - then))
            left = timedelta(
                seconds=round((self._num_steps - metrics.step) * self._batch_size / rate)
            )
            line += f"  {rate:,.0f} images/s" + (f"  {left} left" if left else "")
        self._console.print(line)


def progress_line(phase: str, num_steps: int, metrics: PublicMetrics) -> str:
    """One checkpoint window in a line."""
    parts = [f"{phase}: step {metrics.step:,}/{num_steps:,}", f"lr {metrics.learning_rate:.2e}"]
    if metrics.epsilon is not None:
        parts.insert(1, f"epsilon {metrics.epsilon:.4f}")
    if metrics.train_loss is not None:
        parts.append(f"loss {metrics.train_loss:.4f}")
    if metrics.held_out_loss is not None:
        parts.append(f"public held-out loss {metrics.held_out_loss:.4f}")
    return "  ".join(parts)


def print_prepared(console: Console, name: str, destination: Location) -> None:
    """What prepare kept and left out, and why.

    How many private records were left out is for the operator at this terminal; where output goes
    to a log, which others may read, only the place of the summary is told.
    """
    summary = read_summary(destination)
    kept = ", ".join(f"{split} {num:,}" for split, num in summary["num_records"].items())
    left = ", ".join(f"{num:,} {reason}" for reason, num in summary["left_out"].items() if num)
    if summary["visibility"] == "private" and not console.is_terminal:
        left = f"see {destination}/{SUMMARY_NAME} (readable by its owner)"
    console.print(f"data {name} ({summary['visibility']}): {kept}; left out: {left or 'none'}")


def print_ledger(console: Console, ledger: Ledger) -> None:
    """What a privacy domain has paid: runs, phases, attempts, epsilon, and its head.

    A run of several phases has a line of its own below them: what they come to together.
    """
    report = ledger.verify()
    table = Table(title=f"privacy domain {report.domain}", title_justify="left", box=None)
    for heading in ("run", "phase", "attempts", "steps charged", "of", "ended", "epsilon, delta"):
        table.add_column(heading)
    for run in dict.fromkeys(account.run for account in report.phases):
        phases = [account for account in report.phases if account.run == run]
        for account in phases:
            mechanism = account.mechanism
            table.add_row(
                run,
                account.phase,
                f"{len(account.attempts)}",
                f"{account.num_charged_steps:,}",
                f"{mechanism.num_steps:,} + {mechanism.reserve_steps:,}",
                account.finished or "not yet",
                _cost_text([account]),
            )
        if len(phases) > 1:
            num_attempts = sum(len(account.attempts) for account in phases)
            num_steps = sum(account.num_charged_steps for account in phases)
            whole = [run, "all phases", f"{num_attempts}", f"{num_steps:,}"]
            table.add_row(*whole, "", "", _cost_text(phases))
    console.print(table)
    for who, where, reason in report.unprotected:
        console.print(f"  read without protection: by {who}, {where}: {reason}", style="yellow")
    console.print(f"total over all runs: {total_text(report)}", style="bold")
    if report.budget is not None:
        budget = report.budget
        spent = epsilon_of_charges(ledger.charges(), budget.delta).value if report.phases else 0.0
        console.print(
            f"budget: epsilon {budget.epsilon} at delta {budget.delta:.3g}; spent at this delta: "
            f"{spent}"
        )
    head = report.head
    console.print(f"ledger: {report.num_entries} entries, head {head.index} {head.digest}")


def total_text(report: LedgerReport) -> str:
    """What all runs over a domain come to, in words."""
    if not report.is_total_bounded:
        return "UNBOUNDED"
    if report.epsilon is None:
        return "nothing was charged"
    return f"epsilon {report.epsilon.value} at delta {report.epsilon.delta:.3g}"


def _cost_text(accounts: Sequence[PhaseAccount]) -> str:
    """What phases come to together, at the smallest of their deltas."""
    if any(attempt.is_seeded for account in accounts for attempt in account.attempts):
        return "NOT PRIVATE (seeded)"
    delta = min(account.mechanism.delta for account in accounts)
    charges = [charge for account in accounts for charge in account.charges]
    return f"{epsilon_of_charges(charges, delta).value}, {delta:.3g}"
