"""What can be refused before anything is made: places that cannot be written, sources that are not.

Everything here is a question about storage; what a plan costs is asked in plan.py.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable

from pipeline.chain.layout import RunLayout
from pipeline.data.manifest import DatasetManifest
from pipeline.data.sources import open_source
from pipeline.privacy.ledger import LedgerError
from pipeline.storage import Location
from pipeline.training.checkpoint import read_facts


def check_places(layout: RunLayout) -> None:
    """Every place that a recipe names can be used.

    Raises:
        ValueError: naming the field, its value and what to do.
    """
    recipe = layout.recipe
    _check_writable("storage", recipe.storage, layout.storage)
    for phase in recipe.phases:
        if phase.init not in ("previous", "fresh"):
            _check_init(f"phases.{phase.name}.init", phase.init)
    for name in recipe.data:
        roots = [layout.data_root(reference) for reference in layout.references(name)]
        if not all(DatasetManifest.exists(root) for root in roots):
            _check_source(f"data.{name}.", layout.prepare_config(name).source)
    if recipe.private_storage is not None:
        _check_writable("private_storage", recipe.private_storage, Location(recipe.private_storage))
    for ledger in layout.ledgers():
        try:
            ledger.require_writable()
        except LedgerError as error:
            raise type(error)(f"ledger_home is {layout.ledger_home!r}: {error}") from None


def _check_source(field: str, source: str) -> None:
    try:
        open_source(source)
    except (OSError, ValueError) as error:
        reason = str(error).strip()
        if not reason.startswith("source="):  # a storage's own words
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
