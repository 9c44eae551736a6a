"""The ledger of a privacy domain, and the attempts that pay into it before they run."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any, Literal

from pipeline.privacy.accountant import Epsilon
from pipeline.privacy.composition import WHOLE, Charge, Spent, epsilon_of_charges, is_within
from pipeline.privacy.ledger.entries import (
    BudgetExceeded,
    FencedError,
    LedgerEntry,
    LedgerError,
    LedgerHead,
    LedgerStorageError,
)
from pipeline.privacy.ledger.home import DOMAIN, Home, HomeUpTo, open_home
from pipeline.privacy.ledger.rules import Budget, DomainState, PhaseAccount
from pipeline.privacy.ledger.signing import (
    KEY_FILE_VARIABLE,
    key_from_environment,
    require_signature,
    signature,
)
from pipeline.privacy.mechanism import Mechanism

_NUM_LISTINGS = 10
_MANY = 16
_MAX_LOST_RACES = 1000


@dataclass(frozen=True, kw_only=True)
class LedgerReport:
    """What `Ledger.verify` recomputed from the entries alone.

    Args:
        head: to be compared with heads kept elsewhere.
        phases: one account per (run, phase), in order of their first attempt.
        epsilon: of everything charged, at the smallest delta of its mechanisms; None if nothing
            was charged.
        is_total_bounded: False if private records were read without protection.
        unprotected: (run, phase, reason) of each recorded access without protection.
        signatures: whether each entry's signature was checked, is there unchecked (no key was
            given), or is not there.
    """

    domain: str
    num_entries: int
    head: LedgerHead
    phases: tuple[PhaseAccount, ...]
    epsilon: Epsilon | None
    is_total_bounded: bool
    unprotected: tuple[tuple[str, str, str], ...]
    budget: Budget | None
    signatures: Literal["checked", "not checked", "none"]


class Ledger:
    """The record of what a privacy domain has paid, one immutable object per entry.

    Args:
        home: a path, or s3://, gs://, az:// (extra `object-store`), or a Home.
        domain: name of the privacy domain: lower-case letters, digits, `.`, `_`, `-`.
        key: signs what is written and must have signed what is read; default: the content of
            the file that DP_PRETRAIN_LEDGER_KEY_FILE names, or none. b"" is none, whatever the
            environment says: signatures are then not checked.

    Guarantees:
        1. An entry exists whole or not at all, whatever the moment of a kill -9, and an append
           that returned is durable (test_kill_at_every_system_call).
        2. Two writers never lose or overwrite an entry: appends are create-if-absent, and the
           loser checks anew against what the winner wrote (test_two_writers_at_once).
        3. Altered, reordered, removed or moved entries are refused on reading, and so are
           entries that break the rules (test_tampering_is_refused).
        4. Storage that cannot create-if-absent is refused (test_overwriting_store_is_refused).
        5. With a key, entries that it did not sign are refused; without it, no entry is added to
           signed ones (test_forged_entries_are_refused_with_the_key).

    Without a key whoever may write to the storage is trusted: the chain shows accidents and cuts
    made after a head was kept elsewhere, not a forger who rewrites it from the start. A cut-off
    tail is as well signed as before: only heads kept elsewhere show it.
    """

    def __init__(self, home: str | Home, domain: str, *, key: bytes | None = None) -> None:
        if not DOMAIN.fullmatch(domain):
            raise LedgerError(
                f"domain is {domain!r}; it must be 1 to 63 lower-case letters, digits, '.', '_' "
                "or '-', beginning with a letter or digit"
            )
        self.domain = domain
        self._home = open_home(home, domain) if isinstance(home, str) else home
        self._key = (key_from_environment() if key is None else key) or None
        self._lock = threading.RLock()
        self._entries: list[LedgerEntry] = []
        self._state = DomainState(domain)

    def require_writable(self) -> None:
        """Checks that entries can be read and made here, without making one.

        Raises:
            LedgerError: the storage cannot be written, cannot create-if-absent, or holds entries
                that are not in order.
        """
        self._current()
        self._home.require_writable()

    def entries(self) -> list[LedgerEntry]:
        """Returns all entries, the chain and the rules checked."""
        with self._lock:
            self._refresh()
            return list(self._entries)

    def head(self) -> LedgerHead:
        """Returns the last entry's index and digest (index -1 if there is none)."""
        return self._current().head

    def require_head(self, head: LedgerHead) -> None:
        """Checks that the chain contains a head kept elsewhere, such as in a checkpoint.

        Raises:
            LedgerError: it does not: entries are missing, or others stand in their place.
        """
        entries = self.entries()
        if head.index < 0 or (
            head.index < len(entries) and entries[head.index].digest == head.digest
        ):
            return
        raise LedgerError(
            f"the ledger of domain {self.domain!r} does not contain the head "
            f"{head.index}:{head.digest[:12]} kept elsewhere: its tail was cut off or "
            "rewritten; restore the missing entries"
        )

    def spent(self) -> Spent:
        """Returns (mechanism, charged steps) of all runs over the domain."""
        return self._current().spent()

    def spent_by(self, run: str, phase: str | None = None) -> Spent:
        """Returns (mechanism, charged steps) of one run, or of one of its phases."""
        state = self._current()
        return state.spent(
            account
            for account in state.phases.values()
            if account.run == run and phase in (None, account.phase)
        )

    def charges(self, run: str | None = None) -> list[Charge]:
        """Returns what all runs have paid, or one, by the part of the domain that was sampled."""
        return self._current().charges(run)

    def accounts(self) -> tuple[PhaseAccount, ...]:
        """Returns what every phase of every run has paid and made."""
        return tuple(self._current().phases.values())

    def weights_named(self, digest: str) -> list[tuple[str, str, int]]:
        """Returns (run, phase, step) of every entry that names weights of this digest."""
        return [
            (account.run, account.phase, account.weights[digest][0])
            for account in self.accounts()
            if digest in account.weights
        ]

    def require_weights(self, digest: str, *, run: str, phase: str, step: int) -> None:
        """Checks that weights are what this phase of this run made at this step.

        Raises:
            LedgerError: no entry says so: they were changed, or their step is not what was paid.
        """
        named = self.weights_named(digest)
        if (run, phase, step) not in named:
            raise LedgerError(
                f"the ledger of domain {self.domain!r} does not name the weights {digest[:12]}… as "
                f"step {step} of run {run!r}, phase {phase!r}"
                + "".join(
                    f"; it names them as step {s} of run {r!r}, phase {p!r}" for r, p, s in named
                )
                + ": restore the checkpoint that it names"
            )

    def as_of(self, head: LedgerHead) -> Ledger:
        """Returns the ledger as it was when `head` was its last entry; it cannot be written.

        Raises:
            LedgerError: the chain does not contain `head`.
        """
        self.require_head(head)
        return Ledger(HomeUpTo(self._home, head.index + 1), self.domain, key=self._key or b"")

    @property
    def budget(self) -> Budget | None:
        """The domain's budget over all runs, if it has one."""
        return self._current().budget

    @property
    def has_unprotected(self) -> bool:
        """Whether any access had no guarantee: recorded as unprotected, or seeded."""
        return _has_unprotected(self._current())

    def open_attempt(
        self,
        *,
        run: str,
        phase: str,
        mechanism: Mechanism,
        key_commitment: str,
        first_step: int,
        part: str = WHOLE,
        is_seeded: bool = False,
    ) -> Attempt:
        """Opens the next attempt at a phase and fences all earlier ones.

        Args:
            key_commitment: `AttemptKey.commitment()` of a new key.
            first_step: 0, or the step of the checkpoint resumed from.
            part: `PREPARATION/SPLIT` if only the records of one split are sampled.
            is_seeded: True makes every later statement over the domain unbounded.

        Raises:
            LedgerError: if the mechanism is not the phase's, the key is not new, or the step
                lies beyond what was charged.
            BudgetExceeded: if the steps still to run would take the domain over its budget.
        """
        body = {
            "run": run,
            "phase": phase,
            "mechanism": mechanism.to_json(),
            "mechanism_digest": mechanism.digest(),
            "key_commitment": key_commitment,
            "first_step": first_step,
            "part": part,
            "is_seeded": is_seeded,
        }
        planned = Charge(mechanism, mechanism.num_steps - first_step, part)
        with self._lock:
            self._append("attempt", body, planned=planned)
            return Attempt(ledger=self, run=run, phase=phase)

    def record_weights(self, *, run: str, phase: str, step: int, digest: str, kind: str) -> None:
        """Names weights that a phase made, such as an export: 64 hex digits of SHA-256."""
        body = {"run": run, "phase": phase, "step": step, "digest": digest, "weights_kind": kind}
        self._append("weights", body)

    def record_unprotected(self, run: str, phase: str, reason: str) -> LedgerHead:
        """Records, for ever, that private records were read without protection; do so first."""
        return self._append("unprotected", {"run": run, "phase": phase, "reason": reason})

    def set_budget(self, epsilon: float, delta: float) -> LedgerHead:
        """Sets the most that all runs over the domain may spend; changes stay on record."""
        return self._append("budget", {"epsilon": float(epsilon), "delta": float(delta)})

    def verify(
        self, *, weights_digest: str | None = None, head: LedgerHead | None = None
    ) -> LedgerReport:
        """Recomputes everything from the stored entries alone.

        Args:
            weights_digest: weights that an entry must name.
            head: a head kept elsewhere, such as in a checkpoint, that the chain must contain.

        Raises:
            LedgerError: for any inconsistency, a cut-off tail, or unknown weights.
        """
        fresh = Ledger(self._home, self.domain, key=self._key or b"")
        entries = fresh.entries()
        state = fresh._state
        if head is not None:
            fresh.require_head(head)
        if weights_digest is not None and not fresh.weights_named(weights_digest):
            raise LedgerError(
                f"no entry of domain {self.domain!r} names weights with digest {weights_digest}: "
                "they were not made under this ledger, or were changed since"
            )
        for budget, charges in state.spent_under_budget:
            if not is_within(charges, budget.epsilon, budget.delta):
                raise BudgetExceeded(
                    f"domain {self.domain!r} was charged over its budget of epsilon "
                    f"{budget.epsilon} at delta {budget.delta}"
                )
        charges = state.charges()
        deltas = [charge.mechanism.delta for charge in charges if charge.num_steps]
        return LedgerReport(
            domain=self.domain,
            num_entries=len(entries),
            head=state.head,
            phases=tuple(state.phases.values()),
            epsilon=epsilon_of_charges(charges, min(deltas)) if deltas else None,
            is_total_bounded=not _has_unprotected(state),
            unprotected=tuple(state.unprotected),
            budget=state.budget,
            signatures=fresh._signatures(),
        )

    def _signatures(self) -> Literal["checked", "not checked", "none"]:
        if self._key is not None:
            return "checked"
        is_signed = any(entry.signature is not None for entry in self._entries)
        return "not checked" if is_signed else "none"

    def _current(self) -> DomainState:
        with self._lock:
            self._refresh()
            return self._state

    def _append(
        self,
        kind: str,
        body: dict[str, Any],
        *,
        planned: Charge | None = None,
        writer: Attempt | None = None,
    ) -> LedgerHead:
        """Writes the next entry, checked against all that came before; returns its head.

        Args:
            planned: (mechanism, steps) that must fit the domain's budget.
            writer: the attempt that writes; it must be the newest, and not a copy.
        """
        with self._lock:
            for _ in range(_MAX_LOST_RACES):
                self._refresh()
                state = self._state
                if kind == "attempt":
                    body = {**body, "attempt": state.num_attempts(body["run"], body["phase"])}
                if writer is not None:
                    _check_writer(state, writer)
                state.check(kind, body)
                if planned is not None and state.budget is not None:
                    _check_budget(state, planned, self.domain)
                entry = LedgerEntry(
                    domain=self.domain,
                    index=state.head.index + 1,
                    previous=state.head.digest,
                    kind=kind,
                    written_at=datetime.now(UTC).isoformat(timespec="minutes"),
                    body=body,
                )
                entry = self._signed(entry)
                if self._home.create(entry.index, entry.to_bytes()):
                    state.apply(entry)
                    self._entries.append(entry)
                    return state.head
        raise LedgerStorageError(
            f"the ledger of domain {self.domain!r} could not be written: others were faster "
            f"{_MAX_LOST_RACES} times; nothing was charged, start again"
        )

    def _signed(self, entry: LedgerEntry) -> LedgerEntry:
        """Returns the entry as it is to be written; signed ledgers take signed entries only."""
        if self._key is not None:
            return replace(entry, signature=signature(entry, self._key))
        if any(each.signature is not None for each in self._entries):
            raise LedgerError(
                f"the entries of domain {self.domain!r} are signed, and this process has no key: "
                f"set {KEY_FILE_VARIABLE} to the key's file, here and wherever the phase trains; "
                "nothing was charged"
            )
        return entry

    def _refresh(self) -> None:
        """Reads and checks the entries written since the last look."""
        indices = self._contiguous_indices()
        if len(indices) < len(self._entries):
            raise LedgerError(
                f"the ledger of domain {self.domain!r} has lost entries while in use: "
                f"{len(self._entries)} were there, {len(indices)} are left"
            )
        unread = indices[len(self._entries) :]
        for index, content in zip(unread, self._read(unread), strict=True):
            entry = LedgerEntry.from_bytes(content, domain=self.domain, index=index)
            if self._key is not None:
                require_signature(entry, self._key)
            self._state.apply(entry)
            self._entries.append(entry)

    def _read(self, indices: list[int]) -> Iterable[bytes]:
        """The objects of `indices` in order; many at a time, as an object store wants."""
        if len(indices) < _MANY:
            return [self._home.read(index) for index in indices]
        with ThreadPoolExecutor(_MANY, "ledger") as pool:
            return list(pool.map(self._home.read, indices))

    def _contiguous_indices(self) -> list[int]:
        """Returns 0 .. n-1, the entries there are.

        A listing taken while others write may show entry n + 1 and not n, which was there
        before: look again before calling it a gap.
        """
        indices: list[int] = []
        for listing in range(_NUM_LISTINGS):
            indices = self._home.indices()
            if indices == list(range(len(indices))):
                return indices
            time.sleep(0.005 * (listing + 1))
        missing = sorted(set(range(indices[-1])) - set(indices))
        raise LedgerError(
            f"the ledger of domain {self.domain!r} lacks entry {missing[0]}: entries were "
            "removed; restore them, for without them nothing can be said about the total"
        )


class Attempt:
    """One attempt at a phase: it pays for steps before it runs them; made by `open_attempt`.

    Guarantees:
        1. When `charge` returns, the steps are paid for, durably; when it raises, they must not
           run (test_no_step_runs_uncharged).
        2. A copy of the process that charges the same steps is found out and must end
           (test_forked_attempt_is_fenced).
    """

    def __init__(self, *, ledger: Ledger, run: str, phase: str) -> None:
        account = ledger._state.account(run, phase)
        attempt = account.attempts[-1]
        self.run = run
        self.phase = phase
        self.number = attempt.number
        self.mechanism = account.mechanism
        self.first_step = attempt.first_step
        self.part = attempt.part
        self.is_seeded = attempt.is_seeded
        self._ledger = ledger
        self._next_step = attempt.first_step

    @property
    def next_step(self) -> int:
        """One past the last step this attempt has paid for."""
        return self._next_step

    def charge(self, first_step: int, num_steps: int) -> LedgerHead:
        """Pays for steps [first_step, first_step + num_steps), which may run once this returns.

        Raises:
            ReserveExhausted: nothing is left; the phase ends validly at its last checkpoint.
            FencedError: a newer attempt, or a copy of this one, has taken over.
            BudgetExceeded: the domain's budget over all runs would be passed.
            LedgerError: for steps out of order or beyond the last, or a failing storage.
        """
        body = {
            "run": self.run,
            "phase": self.phase,
            "attempt": self.number,
            "first_step": first_step,
            "num_steps": num_steps,
        }
        head = self._ledger._append(
            "charge", body, planned=Charge(self.mechanism, num_steps, self.part), writer=self
        )
        self._next_step = first_step + num_steps
        return head

    def record_weights(self, step: int, digest: str, kind: str) -> LedgerHead:
        """Names a checkpoint or export this attempt made, by SHA-256 of its weights.

        Raises:
            FencedError: if a newer attempt exists; what this one wrote is not to be used.
        """
        body = {
            "run": self.run,
            "phase": self.phase,
            "step": step,
            "digest": digest,
            "weights_kind": kind,
        }
        return self._ledger._append("weights", body, writer=self)

    def finish(self, reason: str, step: int) -> LedgerHead:
        """Records that the phase ended at `step`: "complete", or "reserve_used_up" before T."""
        body = {
            "run": self.run,
            "phase": self.phase,
            "attempt": self.number,
            "reason": reason,
            "step": step,
        }
        return self._ledger._append("finish", body, writer=self)


def _check_writer(state: DomainState, writer: Attempt) -> None:
    """Raises if `writer` is not the newest attempt, or another process wrote in its name."""
    newest = state.account(writer.run, writer.phase).attempts[-1]
    where = f"attempt {writer.number} of run {writer.run!r}, phase {writer.phase!r}"
    if newest.number != writer.number:
        raise FencedError(
            f"{where} was succeeded by attempt {newest.number}: another process runs this phase "
            "now, so this one ends; follow that one, or give this run another name"
        )
    if newest.next_step != writer.next_step:
        raise FencedError(
            f"{where} stands at step {newest.next_step} in the ledger and at {writer.next_step} "
            "here: a copy of this process writes too; end at once"
        )


def _check_budget(state: DomainState, planned: Charge, domain: str) -> None:
    budget = state.budget
    assert budget is not None
    total = [*state.charges(), planned]
    if not is_within(total, budget.epsilon, budget.delta):
        raise BudgetExceeded(
            f"{planned.num_steps} more steps would take domain {domain!r} to epsilon "
            f"{epsilon_of_charges(total, budget.delta).value} at delta {budget.delta}, over its "
            f"budget of {budget.epsilon}; spend less, or raise the budget (which stays on record)"
        )


def _has_unprotected(state: DomainState) -> bool:
    return bool(state.unprotected) or any(
        attempt.is_seeded for account in state.phases.values() for attempt in account.attempts
    )
