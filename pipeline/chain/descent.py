"""Does a checkpoint own up to every private phase that its weights descend from?

A checkpoint says itself what it descends from, and a file can be edited. The ledgers name the
weights of every private checkpoint, and of every public phase that went on from one: whatever they
know of a checkpoint, or of what it started from, must be in its lineage.
"""

from __future__ import annotations

from typing import Any

from pipeline.privacy.ledger import Ledger, LedgerError, known_domains
from pipeline.storage import Location
from pipeline.training.checkpoint import CheckpointFacts, read_claim

DESCENDANT = "descendant"
"""Kind of weights that a public phase made from private ones."""


class Descent:
    """What all ledgers of one home know of weights.

    Raises:
        LedgerStorageError: the home cannot be listed.
    """

    def __init__(self, ledger_home: str) -> None:
        self._home = ledger_home
        # Others' domains may be signed with others' keys, or not at all; a run's own ledgers are
        # checked with its key wherever it is charged or verified.
        self._ledgers = [Ledger(ledger_home, name, key=b"") for name in known_domains(ledger_home)]

    def known(self, digest: str) -> list[dict[str, Any]]:
        """Returns the private phases, as lines of a lineage, that `digest` is named for."""
        return [
            {"domain": ledger.domain, "run": run, "phase": phase, "num_steps": step}
            for ledger in self._ledgers
            for run, phase, step in ledger.weights_named(digest)
        ]

    def require_owned_up(self, location: Location) -> tuple[CheckpointFacts, str]:
        """Checks that a checkpoint's lineage has all that the ledgers know of its weights.

        Returns:
            what the checkpoint says of itself, and the digest that it gives of its weights.

        Raises:
            LedgerError: it leaves a private phase out.
            CheckpointError: it is damaged.

        Guarantees:
            1. An edited lineage is found out, whether the run or the phase that it started from
               (`init: PATH`) is edited (test_understated_runs_are_refused,
               test_an_edited_start_is_refused).
        """
        facts, digest = read_claim(location)
        for each in (digest, *facts.origin):
            known = self.known(each)
            if known and not any(line in facts.lineage for line in known):
                raise LedgerError(
                    f"{location} says that its weights descend from the private phases "
                    f"{facts.lineage}; a ledger in {self._home} says that they, or what they "
                    f"started from, were made by {known}: restore its checkpoint.json"
                )
        return facts, digest


def name_descendant(ledger_home: str, location: Location) -> None:
    """Names the weights that a finished public phase made from private ones, once.

    Nothing is charged: what is made from a private phase's result alone costs nothing more.
    """
    facts, digest = read_claim(location)
    for line in {line["domain"]: line for line in facts.lineage}.values():
        ledger = Ledger(ledger_home, line["domain"])
        place = {"run": line["run"], "phase": line["phase"], "step": line["num_steps"]}
        if tuple(place.values()) not in ledger.weights_named(digest):
            ledger.record_weights(**place, digest=digest, kind=DESCENDANT)
