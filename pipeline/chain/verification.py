"""Is what a run claims what its ledgers say? Everything is recomputed from the entries alone."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import Any

from pipeline.chain.layout import RunLayout
from pipeline.privacy.ledger import Ledger, LedgerError, LedgerHead
from pipeline.privacy.statement import LineageStep, build_statement, statement_text
from pipeline.training.checkpoint import Checkpoint, all_checkpoints, load_checkpoint

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
    """
    for ledger in layout.ledgers():
        report = ledger.verify()
        yield (
            f"ledger of domain {report.domain!r}: {report.num_entries} entries; chain, rules and"
            " digests hold"
        )
    for phase in layout.recipe.phases:
        for location in all_checkpoints(layout.phase(phase.name)):
            saved = load_checkpoint(location)
            _check_checkpoint(layout, saved)
            named = "; the ledger names its weights" if saved.facts.ledger_head else ""
            yield f"{phase.name}, {location.name}: digests hold{named}"
    marker = layout.export / "privacy.json"
    if not marker.exists():
        yield "export: none yet"
        return
    weights = hashlib.sha256((layout.export / "model.safetensors").read_bytes()).hexdigest()
    statements = json.loads(marker.read_text())["statements"]
    for statement in statements:
        _check_statement(layout, statement, weights)
        own = statement["epsilon"]["this_model"]
        value = own if isinstance(own, str) else f"epsilon {own['value']}"
        yield (
            f"export: weights {weights[:12]}… are named in domain {statement['domain']!r}; the"
            f" statement is what its entries give ({value} for this model)"
        )
    if statements:
        text = "\n".join(statement_text(each) for each in statements)
        if (layout.export / "PRIVACY.md").read_text() != text:
            raise LedgerError(
                f"{layout.export / 'PRIVACY.md'} is not the text of privacy.json: it was edited;"
                " delete the export folder's privacy.json and run again to write both anew"
            )
        yield "export: PRIVACY.md is the statement's own text"


def _check_checkpoint(layout: RunLayout, saved: Checkpoint) -> None:
    """The newest head and the weights of a private checkpoint stand in its domain's ledger."""
    facts = saved.facts
    if facts.ledger_head is None:
        if facts.mechanism_digest is not None:
            raise LedgerError(
                f"{saved.location} was made by a private phase and keeps no ledger head: nothing"
                " says what it cost"
            )
        return
    index, digest = facts.ledger_head
    Ledger(layout.ledger_home, facts.lineage[-1]["domain"]).verify(
        head=LedgerHead(index=index, digest=digest), weights_digest=saved.weights_digest
    )


def _check_statement(layout: RunLayout, statement: Mapping[str, Any], weights: str) -> None:
    """Every field of a statement is what the ledger gives today, but for what later runs add."""
    if statement["weights_sha256"] != weights:
        raise LedgerError(
            f"{layout.export / 'model.safetensors'} has the digest {weights[:12]}…, but its"
            f" statement is about {statement['weights_sha256'][:12]}…: the weights were changed"
        )
    ledger = Ledger(layout.ledger_home, statement["domain"])
    kept = statement["ledger"]
    ledger.verify(head=LedgerHead(index=kept["head_index"], digest=kept["head_sha256"]))
    recomputed = build_statement(
        ledger=ledger,
        run=statement["run"],
        lineage=[
            LineageStep(run=step["run"], phase=step["phase"], num_steps=step["num_steps"])
            for step in statement["phases"]
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
