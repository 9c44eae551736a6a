"""Is what a run claims what its ledgers say? Everything is recomputed from the entries alone."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load

from pipeline.chain.console import total_text
from pipeline.chain.descent import Descent
from pipeline.chain.layout import RunLayout
from pipeline.chain.results import expected_card, expected_export, state
from pipeline.data.manifest import DatasetManifest
from pipeline.privacy.ledger import Ledger, LedgerError, LedgerHead, LedgerReport
from pipeline.recipe import Phase
from pipeline.storage import Location
from pipeline.training.checkpoint import (
    Checkpoint,
    CheckpointFacts,
    all_checkpoints,
    load_checkpoint,
)

Lineage = list[dict[str, Any]]
Statement = Mapping[str, Any]

_SIGNATURES = {
    "checked": "signatures checked",
    "not checked": "signatures are there and were NOT checked (no key is set)",
    "none": "not signed",
}


def verify_run(layout: RunLayout) -> Iterator[str]:
    """Checks a run against the ledgers of its domains and says each thing that was found right.

    Yields:
        One sentence for each part that holds, in order: ledgers, checkpoints, export, statement;
        then what was not checked.

    Raises:
        LedgerError: an entry is missing, altered or out of order; the ledger was cut off after a
            head that a checkpoint or the statement keeps; weights that no entry names; a statement
            that is not what the entries gave when it was made; an exported file that is not what
            its checkpoint gives.
        CheckpointError: a checkpoint's bytes differ from its digests.

    Guarantees:
        1. Edited and missing entries, a cut-off tail, changed weights and an embellished statement
           are refused (test_tampered_runs_are_refused).
        2. So is what claims less than there was: a private phase left out of what the weights
           descend from, fewer steps than lead to them, a statement taken away
           (test_understated_runs_are_refused).
        3. Exported files that are not the last checkpoint's are refused
           (test_edited_exports_are_refused).
    """
    for ledger in layout.ledgers():
        yield _ledger_text(ledger.verify())
    descent = Descent(layout.ledger_home)
    lineage: Lineage = []
    for phase in layout.recipe.phases:
        before = _lineage_of_start(phase, lineage, descent)
        for location in all_checkpoints(layout.phase(phase.name)):
            descent.require_owned_up(location)
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


def _ledger_text(report: LedgerReport) -> str:
    return (
        f"ledger of domain {report.domain!r}: {report.num_entries} entries; chain, rules and "
        f"digests hold; {_SIGNATURES[report.signatures]}; all runs: {total_text(report)}"
    )


def _lineage_of_start(phase: Phase, previous: Lineage, descent: Descent) -> Lineage:
    """The private phases that shaped the weights which `phase` starts from."""
    if phase.init == "fresh":
        return []
    if phase.init == "previous":
        return previous
    return descent.require_owned_up(Location(phase.init))[0].lineage


def _check_checkpoint(
    layout: RunLayout, phase: Phase, saved: Checkpoint, before: Lineage
) -> Lineage:
    """A checkpoint claims no less than its phase did; head and weights stand in the ledger.

    Returns:
        Its lineage: `before` and, for a private phase, the steps of this one.
    """
    facts, expected = saved.facts, before
    if facts.recipe_digest != layout.recipe.digest():
        raise LedgerError(
            f"{saved.location} was trained under another recipe than {layout.root}/recipe.yaml: "
            "one of them was edited; restore it"
        )
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
    if expected and (phase.kind == "private" or facts.finished):
        _check_named(layout, facts, expected[-1], saved.weights_digest)
    return expected


def _check_named(
    layout: RunLayout, facts: CheckpointFacts, line: Mapping[str, Any], weights_digest: str
) -> None:
    """The ledger holds the head that a checkpoint keeps, and names its weights for a phase."""
    ledger = Ledger(layout.ledger_home, line["domain"])
    if facts.ledger_head is not None:
        index, digest = facts.ledger_head
        ledger.verify(head=LedgerHead(index=index, digest=digest))
    ledger.require_weights(
        weights_digest, run=line["run"], phase=line["phase"], step=line["num_steps"]
    )


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
    weights = hashlib.sha256(model.read_bytes()).hexdigest()
    for statement in statements:
        yield from _check_statement(layout, statement, weights, lineage)
    yield from _check_files(layout, load_checkpoint(final), statements)
    yield "not checked: report.html, evaluation.json, TensorBoard (scores of public data)"


def _check_statement(
    layout: RunLayout, statement: Statement, weights: str, lineage: Lineage
) -> Iterator[str]:
    """Every field of a statement is what the ledger gave when it was made."""
    if statement["weights_sha256"] != weights:
        raise LedgerError(
            f"{layout.export / 'model.safetensors'} has the digest {weights[:12]}…, but its"
            f" statement is about {statement['weights_sha256'][:12]}…: the weights were changed;"
            " delete the export folder and run again to write them anew"
        )
    ledger, kept = Ledger(layout.ledger_home, statement["domain"]), statement["ledger"]
    head = LedgerHead(index=kept["head_index"], digest=kept["head_sha256"])
    recomputed = json.loads(json.dumps(state(layout, ledger.as_of(head), lineage, weights)))
    gone = _public_sets_gone(layout)
    if gone:
        recomputed["public_data"] = statement["public_data"]
        yield f"NOT checked: public_data of the statement ({', '.join(gone)}: no longer prepared)"
    names = sorted(statement.keys() | recomputed.keys())
    differing = [name for name in names if statement.get(name) != recomputed.get(name)]
    if differing:
        raise LedgerError(
            f"{layout.export / 'privacy.json'} says otherwise than the ledger in"
            f" {', '.join(differing)}: stated {[statement.get(n) for n in differing]}, recomputed"
            f" {[recomputed.get(n) for n in differing]} (where only the accountant's version"
            " differs, delete privacy.json and run again to state it anew)"
        )
    own = statement["epsilon"]["this_model"]
    value = own if isinstance(own, str) else f"epsilon {own['value']}"
    yield (
        f"export: weights {weights[:12]}… are named in domain {statement['domain']!r}; the"
        f" statement is what its entries gave up to entry {kept['head_index']} ({value} for this"
        " model)"
    )
    if ledger.head() == head:
        return
    today = state(layout, ledger, lineage, weights)["epsilon"]
    if today != statement["epsilon"]:
        yield (
            f"since then domain {statement['domain']!r} was read again: today this model's own"
            f" epsilon is {_value(today['this_model'])}, all runs come to"
            f" {_value(today['domain'])} (stated: {_value(statement['epsilon']['domain'])}); delete"
            f" {layout.export / 'privacy.json'} and run again to state it anew"
        )


def _value(epsilon: Mapping[str, Any] | str) -> str:
    return epsilon.upper() if isinstance(epsilon, str) else f"{epsilon['value']}"


def _public_sets_gone(layout: RunLayout) -> list[str]:
    public = [name for name, d in layout.recipe.data.items() if d.visibility == "public"]
    references = [reference for name in public for reference in layout.references(name)]
    return [r for r in references if not DatasetManifest.exists(layout.data_root(r))]


def _check_files(
    layout: RunLayout, saved: Checkpoint, statements: Sequence[Statement]
) -> Iterator[str]:
    """Every file beside the statement is what the last checkpoint and the statement give."""
    expected = expected_export(layout, saved, statements)
    try:
        expected["README.md"] = expected_card(layout, saved, statements).encode()
    except ValueError as error:
        yield f"NOT checked: {layout.export / 'README.md'} ({error})"
    for name, content in expected.items():
        place = layout.export / name
        found = place.read_bytes()
        if found != content and not (name.endswith(".safetensors") and _same(found, content)):
            raise LedgerError(
                f"{place} is not what {saved.location} and privacy.json give: it was edited, or"
                " written by another version; delete the export folder and run again to write it"
                " anew"
            )
    yield f"export: {', '.join(expected)} are what the last checkpoint and the statement give"


def _same(found: bytes, expected: bytes) -> bool:
    """Whether two safetensors files hold the same tensors."""
    try:
        left, right = load(found), load(expected)
    except SafetensorError:
        return False
    return left.keys() == right.keys() and all(torch.equal(left[n], right[n]) for n in left)
