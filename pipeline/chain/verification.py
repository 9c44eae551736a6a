"""Is what a run claims what its ledgers say? Everything is recomputed from the entries alone."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import Any

from pipeline.chain.console import total_text
from pipeline.chain.layout import RunLayout
from pipeline.chain.results import NO_LINEAGE_TEXT
from pipeline.privacy.ledger import Ledger, LedgerError, LedgerHead
from pipeline.privacy.statement import LineageStep, build_statement, statement_text
from pipeline.recipe import Phase
from pipeline.storage import Location
from pipeline.training.checkpoint import Checkpoint, all_checkpoints, load_checkpoint, read_facts

Lineage = list[dict[str, Any]]

_GROWS_WITH_THE_DOMAIN = ("ledger", "domain_budget")


def verify_run(layout: RunLayout) -> Iterator[str]:
    """Checks a run against the ledgers of its domains and says each thing that was found right.

    Yields:
        One sentence for each part that holds, in order: ledgers, checkpoints, export, statement.

    Raises:
        LedgerError: an entry is missing, altered or out of order; the ledger was cut off after a
            head that a checkpoint or the statement keeps; weights that no entry names; a statement
            that is not what the entries give.
        CheckpointError: a checkpoint's bytes differ from its digests.

    Guarantees:
        1. Edited and missing entries, a cut-off tail, changed weights and an embellished statement
           are refused (test_tampered_runs_are_refused).
        2. So is what claims less than there was: a private phase left out of what the weights
           descend from, fewer steps than lead to them, a statement taken away
           (test_understated_runs_are_refused).
    """
    for ledger in layout.ledgers():
        report = ledger.verify()
        yield (
            f"ledger of domain {report.domain!r}: {report.num_entries} entries; chain, rules and"
            f" digests hold; all runs: {total_text(report)}"
        )
    lineage: Lineage = []
    for phase in layout.recipe.phases:
        before = _lineage_of_start(phase, lineage)
        for location in all_checkpoints(layout.phase(phase.name)):
            saved = load_checkpoint(location)
            lineage = _check_checkpoint(layout, phase, saved, before)
            named = "; the ledger names its weights" if saved.facts.ledger_head else ""
            yield f"{phase.name}, {location.name}: digests hold{named}"
    try:
        yield from _verify_export(layout, lineage)
    except (KeyError, TypeError) as error:
        raise LedgerError(
            f"{layout.export / 'privacy.json'} is no statement of this version ({error!r}): delete "
            "it and run again to state it anew"
        ) from None


def _verify_export(layout: RunLayout, lineage: Lineage) -> Iterator[str]:
    """The exported weights and their statements, against what the last checkpoint descends from."""
    marker, model = layout.export / "privacy.json", layout.export / "model.safetensors"
    if not marker.exists():
        if model.exists():
            raise LedgerError(
                f"{model} has no privacy.json beside it: nothing is claimed about these weights;"
                " run again to write the statement"
            )
        yield "export: none yet"
        return
    if not layout.is_exported():
        raise LedgerError(
            f"{layout.export} is not whole: a part is missing or cannot be read; run again, and it "
            "is written anew from the last checkpoint"
        )
    weights = hashlib.sha256(model.read_bytes()).hexdigest()
    statements = layout.statements() or []
    domains = list(dict.fromkeys(line["domain"] for line in lineage))
    stated = [statement["domain"] for statement in statements]
    final = layout.finished_phase(layout.recipe.phases[-1].name)
    if final is None:
        raise LedgerError(
            f"{marker} is about weights whose last checkpoint is gone, so what they descend from"
            f" cannot be checked: restore {layout.phase(layout.recipe.phases[-1].name)}"
        )
    if stated != domains:
        raise LedgerError(
            f"{marker} states the domains {stated}; the weights descend from private phases over"
            f" {domains}: delete privacy.json and run again to state it anew"
        )
    for statement in statements:
        _check_statement(layout, statement, weights, lineage)
        own = statement["epsilon"]["this_model"]
        value = own if isinstance(own, str) else f"epsilon {own['value']}"
        yield (
            f"export: weights {weights[:12]}… are named in domain {statement['domain']!r}; the"
            f" statement is what its entries give ({value} for this model)"
        )
    text = "\n".join(statement_text(each) for each in statements) or NO_LINEAGE_TEXT
    if (layout.export / "PRIVACY.md").read_text() != text:
        raise LedgerError(
            f"{layout.export / 'PRIVACY.md'} is not the text of privacy.json: it was edited;"
            " delete the export folder's privacy.json and run again to write both anew"
        )
    yield "export: PRIVACY.md is the statement's own text"


def _lineage_of_start(phase: Phase, previous: Lineage) -> Lineage:
    """The private phases that shaped the weights which `phase` starts from."""
    if phase.init == "fresh":
        return []
    return previous if phase.init == "previous" else read_facts(Location(phase.init)).lineage


def _check_checkpoint(
    layout: RunLayout, phase: Phase, saved: Checkpoint, before: Lineage
) -> Lineage:
    """A checkpoint claims no less than its phase did; head and weights stand in the ledger.

    Returns:
        Its lineage: `before` and, for a private phase, the steps of this one.
    """
    facts = saved.facts
    expected = before
    if phase.kind == "private":
        own = {"run": layout.recipe.name, "phase": phase.name, "num_steps": facts.step}
        expected = [*before, {"domain": layout.domain(phase), **own}]
        if facts.ledger_head is None:
            raise LedgerError(
                f"{saved.location} was made by a private phase and keeps no ledger head: nothing"
                " says what it cost; restore its checkpoint.json"
            )
    if facts.lineage != expected:
        raise LedgerError(
            f"{saved.location} says that its weights descend from the private phases"
            f" {facts.lineage}; the phases of this run give {expected}: restore its checkpoint.json"
        )
    if facts.ledger_head is not None:
        index, digest = facts.ledger_head
        report = Ledger(layout.ledger_home, facts.lineage[-1]["domain"]).verify(
            head=LedgerHead(index=index, digest=digest), weights_digest=saved.weights_digest
        )
        made = [
            account.weights[saved.weights_digest][0]
            for account in report.phases
            if (account.run, account.phase) == (layout.recipe.name, phase.name)
            and saved.weights_digest in account.weights
        ]
        if made != [facts.step]:
            raise LedgerError(
                f"{saved.location} says that it is step {facts.step}; the ledger says of its"
                f" weights, for this phase: step {made}: restore its checkpoint.json"
            )
    return expected


def _check_statement(
    layout: RunLayout, statement: Mapping[str, Any], weights: str, lineage: Lineage
) -> None:
    """Every field of a statement is what the ledger gives today, but for what later runs add."""
    if statement["weights_sha256"] != weights:
        raise LedgerError(
            f"{layout.export / 'model.safetensors'} has the digest {weights[:12]}…, but its"
            f" statement is about {statement['weights_sha256'][:12]}…: the weights were changed;"
            " delete the export folder and run again to write them anew"
        )
    ledger = Ledger(layout.ledger_home, statement["domain"])
    kept = statement["ledger"]
    ledger.verify(head=LedgerHead(index=kept["head_index"], digest=kept["head_sha256"]))
    recomputed = build_statement(
        ledger=ledger,
        run=layout.recipe.name,
        lineage=[
            LineageStep(run=line["run"], phase=line["phase"], num_steps=line["num_steps"])
            for line in lineage
            if line["domain"] == statement["domain"]
        ],
        weights_digest=weights,
        hyperparameter_search=layout.recipe.hyperparameter_search,
        public_data=statement["public_data"],
        labels_covered=statement["labels_covered"],
    )
    stated, found = _comparable(statement), _comparable(recomputed)
    differing = sorted(n for n in stated.keys() | found.keys() if stated.get(n) != found.get(n))
    if differing:
        raise LedgerError(
            f"{layout.export / 'privacy.json'} says otherwise than the ledger in"
            f" {', '.join(differing)}: stated {[stated.get(n) for n in differing]}, recomputed"
            f" {[found.get(n) for n in differing]} (where only the accountant's version differs,"
            " delete privacy.json and run again to state it anew)"
        )


def _comparable(statement: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that stay, whatever other runs do to the domain afterwards."""
    fields = {k: v for k, v in statement.items() if k not in _GROWS_WITH_THE_DOMAIN}
    fields["epsilon"] = {k: v for k, v in statement["epsilon"].items() if k != "domain"}
    return json.loads(json.dumps(fields))
