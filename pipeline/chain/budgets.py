"""Budgets of privacy domains: written into their ledgers, and kept to before anything trains."""

from __future__ import annotations

from collections.abc import Sequence

from pipeline.chain.layout import RunLayout
from pipeline.data.manifest import split_part
from pipeline.plan import PhasePlan
from pipeline.privacy.composition import Charge, epsilon_of_charges
from pipeline.privacy.ledger import BudgetExceeded, Ledger


def hold_to_budgets(layout: RunLayout, plans: Sequence[PhasePlan]) -> list[str]:
    """Refuses a plan that does not fit what is left of a budget, then puts the budgets on record.

    What counts is everything charged by all runs over the domain, and the steps that this plan has
    still to run; its reserve is paid for only if it is needed, and refused then if it does not fit.

    Returns:
        One sentence for each budget that is now another than before, to be shown.

    Raises:
        BudgetExceeded: naming the domain, its budget and what the plan would come to.

    Guarantees:
        1. A plan over the budget is refused before any phase trains (test_budget_is_kept_to).
        2. The ledger itself refuses whatever gets past this (test_budget_over_all_runs).
    """
    check_budgets(layout, plans)
    changes = []
    for ledger in layout.ledgers():
        wanted, known = layout.recipe.budget_of(ledger.domain), ledger.budget
        now = (wanted.epsilon, wanted.delta) if wanted is not None else None
        before = (known.epsilon, known.delta) if known is not None else None
        if now is None or now == before:
            continue
        ledger.set_budget(*now)
        if before is not None:
            changes.append(
                f"domain {ledger.domain!r}: its budget over all runs was epsilon {before[0]} at "
                f"delta {before[1]}; by this recipe it is now epsilon {now[0]} at delta {now[1]} "
                "(the ledger keeps both)"
            )
    return changes


def check_budgets(layout: RunLayout, plans: Sequence[PhasePlan]) -> None:
    """As `hold_to_budgets`, with nothing written. Raises BudgetExceeded."""
    for ledger in layout.ledgers():
        budget = layout.recipe.budget_of(ledger.domain) or ledger.budget
        if budget is None:
            continue
        total = [*ledger.charges(), *_still_to_run(layout, ledger, plans)]
        cost = epsilon_of_charges(total, budget.delta).value
        if cost > budget.epsilon:
            spent = epsilon_of_charges(ledger.charges(), budget.delta).value
            raise BudgetExceeded(
                f"domain {ledger.domain!r} has a budget of epsilon {budget.epsilon} at delta "
                f"{budget.delta:.3g} over all its runs; {spent} is spent, and with the steps that "
                f"this run has still to do it would come to {cost}: lower target_epsilon or steps, "
                "or raise data.NAME.budget (which stays on record)"
            )


def _still_to_run(layout: RunLayout, ledger: Ledger, plans: Sequence[PhasePlan]) -> list[Charge]:
    """The steps of this run's phases over the domain that are not charged yet."""
    charged = {
        account.phase: account.next_step
        for account in ledger.accounts()
        if account.run == layout.recipe.name
    }
    steps = []
    for plan in plans:
        phase = layout.recipe.phase(plan.name)
        domain = layout.recipe.dataset_of(phase.data, f"phases.{phase.name}.data").domain
        if plan.mechanism is not None and domain == ledger.domain:
            left = plan.num_steps - charged.get(plan.name, 0)
            if left > 0 and not layout.is_trained(plan.name):
                part = split_part(layout.data_root(phase.data))
                steps.append(Charge(plan.mechanism, left, part))
    return steps
