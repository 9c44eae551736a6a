"""The privacy statement that travels with a model: what is promised, to whom, and what is not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pipeline.privacy.accountant import PLD_INTERVAL
from pipeline.privacy.composition import Charge, epsilon_of_charges
from pipeline.privacy.ledger import Ledger, LedgerError, LedgerReport, PhaseAccount
from pipeline.privacy.mechanism import Adjacency, Mechanism

FORMAT = "dp-pretrain privacy statement, version 1"
NO_GUARANTEE = "none: NOT PRIVATE"
UNBOUNDED = "unbounded"

HyperparameterSearch = Literal["not_stated", "none", "public", "unaccounted", "accounted"]

_SEARCHES: Mapping[str, str] = {
    "not_stated": "nobody has stated what the choice of hyper-parameters looked at; if it was the "
    "private records, what that reveals is NOT part of any epsilon here",
    "none": "no hyper-parameter was chosen by looking at the private records",
    "public": "hyper-parameters were chosen on public data only",
    "unaccounted": "hyper-parameters were chosen with the private records in view, and what that "
    "reveals is NOT part of any epsilon here",
    "accounted": "the runs that chose the hyper-parameters are part of the domain's epsilon",
}
_ADJACENCIES: Mapping[Adjacency, str] = {
    "replace_special": "neighbours share N, q and B, and one privacy unit is replaced by null "
    "records (which add nothing); the number of records and their ids are public",
    "add_or_remove_one": "neighbours differ by the presence of one privacy unit; the number of "
    "records is private and stated nowhere",
}
_TRUSTED = (
    "whoever operates the cluster and its storage, who see the records themselves (central model)",
    "whoever can write to the ledger's storage",
    "whoever can observe timing, memory or traffic of the machines while the phase runs",
)
_NOT_COVERED = (
    "which records were collected, filtered or prepared, and de-duplication across records",
    "the number of records (public under replace_special)",
    "the time steps take, and what a crash or an operator's stop reveals",
    "copies of a picture that are not exact, or several records of one person: the guarantee "
    "weakens with the number of records a person has",
    "the private log, and anything the operator copies out of it",
    "data on which the encoder is later fine-tuned or probed without privacy",
)
_ASSUMPTIONS = (
    "computational: AES-256 in counter mode and SHA-256 behave as random functions, and the "
    "operating system's entropy is unpredictable; the guarantee is against bounded adversaries",
    "sampling: exact Poisson within 2^-109 in total variation per step",
    "floating point: sums of clipped gradients in fp32 with a margin of 2^-12 on the clipping "
    "norm, noise in float64, their sum rounded once to a power-of-two grid; the difference from "
    "real-valued Gaussian noise is not part of delta",
    "composition: all phases, attempts and runs over the domain are added up, but for those that "
    "read different splits of one preparation: a record lies in one of them, as its own digest and "
    "public text decide, so of these the dearest counts; splits of different preparations add up",
    "steps that were charged, and lost in a crash before a checkpoint of theirs was on record, "
    "showed nothing: this model's own epsilon counts the steps that lead to it and those whose "
    "checkpoint was on record before the phase went back behind them; the run's counts all",
)


@dataclass(frozen=True, kw_only=True)
class LineageStep:
    """A private phase on the way to the weights: `num_steps` of its steps lead to them."""

    run: str
    phase: str
    num_steps: int


def build_statement(
    *,
    ledger: Ledger,
    run: str,
    lineage: Sequence[LineageStep],
    weights_digest: str,
    hyperparameter_search: HyperparameterSearch,
    public_data: Sequence[str] = (),
    labels_covered: bool = True,
    clipping: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Returns the statement of one model over one privacy domain, as JSON-able fields.

    Args:
        ledger: of the domain; verified anew, and every mechanism is taken from it.
        run: the run that made the model.
        lineage: the private phases the weights descend from, in order.
        weights_digest: SHA-256 hex digest of the weights; an entry must name it.
        hyperparameter_search: what the choice of hyper-parameters looked at.
        public_data: one sentence per public data set: its name and origin.
        labels_covered: whether labels are part of the protected record.
        clipping: how each phase of `run` bounds what a record adds, one sentence a phase, from the
            run's recipe; the bound itself is the ledger's.

    Raises:
        LedgerError: if the ledger does not verify, does not name the weights as those of the
            lineage's last step, or was not charged for the lineage.

    Guarantees:
        1. Nothing in it is typed by hand that the ledger knows (test_statement_follows_ledger).
        2. A seeded attempt in the lineage makes it NOT PRIVATE; unprotected access to the
           domain makes the domain's total unbounded (test_statement_says_not_private).
        3. Steps that led to the weights cannot be left out: the ledger says at which step
           they were made (test_unfounded_statements_are_refused).
        4. Steps that were run again after their result was on record count twice
           (test_discarded_results_are_counted).
    """
    if hyperparameter_search not in _SEARCHES:
        raise ValueError(
            f"hyperparameter_search is {hyperparameter_search!r}; it must be one of "
            f"{', '.join(_SEARCHES)}: say what the choice of hyper-parameters looked at"
        )
    if not lineage:
        raise ValueError("lineage is empty; a model without a private phase needs no statement")
    report = ledger.verify(weights_digest=weights_digest)
    accounts = [_account(report, step) for step in lineage]
    made_at, _ = accounts[-1].weights.get(weights_digest, (None, ""))
    if made_at != lineage[-1].num_steps:
        raise LedgerError(
            f"lineage ends with step {lineage[-1].num_steps} of run {lineage[-1].run!r}, phase "
            f"{lineage[-1].phase!r}; the ledger of domain {report.domain!r} does not name these "
            "weights there: state the steps that led to them"
        )
    led = [
        Charge(account.mechanism, step.num_steps + account.num_discarded_steps, account.part)
        for account, step in zip(accounts, lineage, strict=True)
    ]
    own_phases = [account for account in report.phases if account.run == run]
    started_from = [account for account in accounts if account.run != run]
    executed = [charge for account in own_phases + started_from for charge in account.charges]
    domain = [charge for account in report.phases for charge in account.charges]
    last = accounts[-1].mechanism
    delta = last.delta
    is_private = not any(attempt.is_seeded for a in accounts for attempt in a.attempts)
    own = epsilon_of_charges(led, delta)
    return {
        "format": FORMAT,
        "is_private": is_private,
        "run": run,
        "domain": report.domain,
        "weights_sha256": weights_digest,
        "epsilon": {
            "this_model": own.to_json() if is_private else NO_GUARANTEE,
            "this_run": epsilon_of_charges(executed, delta).to_json()
            if is_private
            else NO_GUARANTEE,
            "domain": epsilon_of_charges(domain, delta).to_json()
            if report.is_total_bounded
            else UNBOUNDED,
        },
        "delta": delta,
        "model_of_privacy": "central differential privacy, approximate (epsilon, delta)",
        "privacy_unit": _unit(last),
        "labels_covered": labels_covered,
        "adjacency": {"name": last.adjacency, "meaning": _ADJACENCIES[last.adjacency]},
        "phases": [
            {
                "run": step.run,
                "phase": step.phase,
                "num_steps": step.num_steps,
                "num_discarded_steps": account.num_discarded_steps,
                "num_charged_steps": account.num_charged_steps,
                "num_attempts": len(account.attempts),
                "ended": account.finished or "not recorded",
                "clipping": (clipping or {}).get(step.phase, "not stated")
                if step.run == run
                else f"as the recipe of run {step.run} says",
                "mechanism": account.mechanism.to_json(),
                "mechanism_sha256": account.mechanism.digest(),
            }
            for account, step in zip(accounts, lineage, strict=True)
        ],
        "sampler": "Poisson: every step takes each record independently with the sampling "
        "probability; no cap, no fixed batch size, empty steps included",
        "accountant": {
            "name": own.accountant,
            "version": own.version,
            "pld_interval": PLD_INTERVAL,
            "rule": "the smaller of two upper bounds, PLD (connect-the-dots, pessimistic) and "
            "RDP, rounded up to four decimals",
        },
        "trusted": list(_TRUSTED),
        "not_covered": [_SEARCHES[hyperparameter_search], *_NOT_COVERED],
        "hyperparameter_search": hyperparameter_search,
        "assumptions": list(_ASSUMPTIONS),
        "public_data": list(public_data),
        "domain_budget": None
        if report.budget is None
        else {"epsilon": report.budget.epsilon, "delta": report.budget.delta},
        "ledger": {
            "num_entries": report.num_entries,
            "head_index": report.head.index,
            "head_sha256": report.head.digest,
        },
    }


def statement_text(statement: Mapping[str, Any]) -> str:
    """Returns the statement as Markdown for people."""
    if statement.get("format") != FORMAT:
        raise ValueError(f"format is {statement.get('format')!r}; it must be {FORMAT!r}")
    lines = ["# Privacy statement", ""]
    lines += _claim(statement)
    lines += ["", "| what | epsilon | delta |", "|---|---|---|"]
    epsilon, delta = statement["epsilon"], statement["delta"]
    for name, title in (
        ("this_model", "this model (the steps that led to it, and results that were discarded)"),
        ("this_run", "everything this run, and the phases it started from, paid for"),
        ("domain", f"all runs over the privacy domain `{statement['domain']}`"),
    ):
        lines.append(f"| {title} | {_epsilon_text(epsilon[name])} | {delta:.4g} |")
    lines += [
        "",
        f"- **Model of privacy**: {statement['model_of_privacy']}.",
        f"- **Privacy unit**: {statement['privacy_unit']['meaning']}. Labels are "
        f"{'covered' if statement['labels_covered'] else 'NOT covered'}.",
        f"- **Adjacency**: `{statement['adjacency']['name']}`: "
        f"{statement['adjacency']['meaning']}.",
        f"- **Sampler**: {statement['sampler']}.",
        f"- **Accountant**: {statement['accountant']['name']}, "
        f"{statement['accountant']['version']}; {statement['accountant']['rule']}.",
        "",
        "## Mechanism",
        "",
        "| phase | N | B | q | noise multiplier | clip | T | steps here | discarded | charged | "
        "delta |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for phase in statement["phases"]:
        m = phase["mechanism"]
        records = "private" if m["num_records"] is None else f"{m['num_records']:,}"
        lines.append(
            f"| {phase['phase']} | {records} | {m['expected_batch_size']:,} | "
            f"{m['sampling_probability']:.6g} | {m['noise_multiplier']} | {m['max_grad_norm']:g} |"
            f" {m['num_steps']:,} (+ {m['reserve_steps']:,} in reserve) | "
            f"{phase['num_steps']:,} | {phase['num_discarded_steps']:,} | "
            f"{phase['num_charged_steps']:,} in "
            f"{phase['num_attempts']} attempt(s) | {m['delta']:.4g} |"
        )
    lines += ["", *(f"- Clipping in {p['phase']}: {p['clipping']}." for p in statement["phases"])]
    for title, name in (
        ("Who is trusted", "trusted"),
        ("What is not covered", "not_covered"),
        ("What it rests on", "assumptions"),
        ("Public data", "public_data"),
    ):
        items = statement[name] or ["none"]
        lines += ["", f"## {title}", "", *(f"- {item}" for item in items)]
    ledger = statement["ledger"]
    lines += [
        "",
        "## Check it",
        "",
        f"Weights SHA-256 `{statement['weights_sha256']}`; ledger of domain "
        f"`{statement['domain']}`, {ledger['num_entries']} entries, head {ledger['head_index']} "
        f"`{ledger['head_sha256']}`.",
    ]
    return "\n".join(lines) + "\n"


def _account(report: LedgerReport, step: LineageStep) -> PhaseAccount:
    for account in report.phases:
        if (account.run, account.phase) == (step.run, step.phase):
            if not 0 < step.num_steps <= account.next_step:
                raise LedgerError(
                    f"lineage names {step.num_steps} steps of run {step.run!r}, phase "
                    f"{step.phase!r}; charged are steps up to {account.next_step}"
                )
            return account
    raise LedgerError(
        f"lineage names run {step.run!r}, phase {step.phase!r}, of which the ledger of domain "
        f"{report.domain!r} has no attempt"
    )


def _unit(mechanism: Mechanism) -> dict[str, Any]:
    record = "one prepared record: a distinct prepared image with its label"
    size = mechanism.group_size
    return {
        "name": mechanism.privacy_unit,
        "group_size": size,
        "meaning": record if size == 1 else f"a group of at most {size} records, each {record}",
    }


def _claim(statement: Mapping[str, Any]) -> list[str]:
    own = statement["epsilon"]["this_model"]
    if not statement["is_private"]:
        return [
            "**NOT PRIVATE.** The randomness of this run follows from a published seed (tests "
            "and rehearsals only). There is no guarantee; do not release the weights as private."
        ]
    lines = [
        f"These weights are ({_epsilon_text(own)}, {statement['delta']:.4g})-differentially "
        f"private with respect to {statement['privacy_unit']['meaning']}, as specified below."
    ]
    if statement["epsilon"]["domain"] == UNBOUNDED:
        lines += [
            "",
            "**The total over the privacy domain is UNBOUNDED**: its records were also read "
            "without protection, as its ledger records.",
        ]
    return lines


def _epsilon_text(epsilon: Mapping[str, Any] | str) -> str:
    if isinstance(epsilon, str):
        return f"**{epsilon}**"
    value = epsilon["value"]
    return "infinite" if value is None else f"{value:.10g}"
