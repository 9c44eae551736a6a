"""What can be refused before anything is made: places that cannot be written, sources that are not.

Everything here is a question about storage; what a plan costs is asked in plan.py.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable

from pipeline.chain.descent import Descent
from pipeline.chain.layout import RunLayout
from pipeline.data.manifest import DatasetManifest
from pipeline.data.sources import open_source
from pipeline.privacy.ledger import Ledger, LedgerError, LedgerHead
from pipeline.storage import Location
from pipeline.training.checkpoint import CheckpointFacts, latest_checkpoint, read_facts


def check_places(layout: RunLayout) -> None:
    """Every place that a recipe names can be used.

    Raises:
        ValueError: naming the field, its value and what to do.
    """
    recipe = layout.recipe
    _check_writable("storage", recipe.storage, layout.storage)
    for place in layout.folders():
        if place.is_local and place.exists() and not place.local_path.is_dir():
            raise ValueError(
                f"storage is {recipe.storage!r}: {place} is a file where a folder is needed; move "
                "it away, or give another storage"
            )
    for phase in recipe.phases:
        if phase.init not in ("previous", "fresh"):
            _check_init(f"phases.{phase.name}.init", phase.init)
    for name in recipe.data:
        roots = [layout.data_root(reference) for reference in layout.references(name)]
        if not all(DatasetManifest.exists(root) for root in roots):
            config = layout.prepare_config(name)
            _check_source(f"data.{name}.", config.source, config.where)
    if recipe.private_storage is not None:
        _check_writable("private_storage", recipe.private_storage, Location(recipe.private_storage))
    for ledger in layout.ledgers():
        try:
            ledger.require_writable()
        except LedgerError as error:
            raise type(error)(f"ledger_home is {layout.ledger_home!r}: {error}") from None


def check_ledgers(layout: RunLayout) -> None:
    """The ledgers still hold what checkpoints and statement of a run, or its start, say of them.

    Raises:
        LedgerError: a ledger was cut off, written anew or is another one: no statement could be
            made about the run's weights.
    """
    phases = layout.recipe.phases
    if all(each.kind == "public" and each.init in ("previous", "fresh") for each in phases):
        return  # nothing private can be in it, and its storage need not be one for ledgers
    descent = Descent(layout.ledger_home)
    for phase in phases:
        latest = latest_checkpoint(layout.phase(phase.name))
        start = Location(phase.init) if phase.init not in ("previous", "fresh") else None
        for checkpoint in (latest, start):
            if checkpoint is not None:
                facts, _ = descent.require_owned_up(checkpoint)
                _check_heads(layout, checkpoint, facts)
    for statement in layout.statements() or []:
        kept = statement["ledger"]
        ledger = Ledger(layout.ledger_home, statement["domain"])
        ledger.require_head(LedgerHead(index=kept["head_index"], digest=kept["head_sha256"]))


def _check_heads(layout: RunLayout, checkpoint: Location, facts: CheckpointFacts) -> None:
    for line in facts.lineage:
        ledger = Ledger(layout.ledger_home, line["domain"])
        known = {(account.run, account.phase) for account in ledger.accounts()}
        if (line["run"], line["phase"]) not in known:
            raise LedgerError(
                f"{checkpoint} descends from phase {line['phase']!r} of run {line['run']!r} over "
                f"private pictures of domain {line['domain']!r}, and the ledger in "
                f"{layout.ledger_home} knows nothing of it: set ledger_home to the one that was "
                "charged, or restore its entries"
            )
    if facts.ledger_head is not None:
        index, digest = facts.ledger_head
        ledger = Ledger(layout.ledger_home, facts.lineage[-1]["domain"])
        ledger.require_head(LedgerHead(index=index, digest=digest))


def _check_source(field: str, source: str, where: str | None) -> None:
    try:
        open_source(source, where)
    except (OSError, ValueError) as error:
        reason = str(error).strip()
        if not reason.startswith(("source=", "where=")):  # a storage's own words
            reason = (
                f"source={source} cannot be listed: {reason}; check the address and that you may "
                "read it (credentials come from the environment)"
            )
        raise ValueError(field + reason) from None


def _check_writable(field: str, value: str, place: Location) -> None:
    def probe() -> None:
        file = place / f".writable-{uuid.uuid4().hex[:8]}"  # two commands may ask at once
        file.write_bytes(b"")
        file.delete()

    _asked(
        f"{field} is {value!r} and cannot be written",
        probe,
        f"give a place you may write, as in --set {field}=/path",
    )


def _check_init(field: str, value: str) -> None:
    place = Location(value)

    def read() -> None:
        if not read_facts(place).finished:
            raise ValueError("that phase is not finished yet")

    _asked(
        f"{field} is {value!r}",
        read,
        "give `previous`, `fresh`, or the folder of a finished phase's last checkpoint "
        "(…/phases/NAME/checkpoint-00000100)",
    )


def _asked(what: str, question: Callable[[], object], remedy: str) -> None:
    """Ask, and turn whatever fails into one sentence that begins with the field."""
    try:
        question()
    except (OSError, ValueError) as error:
        reason = str(error).strip().rstrip(".")
        raise ValueError(f"{what}: {reason}; {remedy}") from None
