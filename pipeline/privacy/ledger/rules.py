"""What may follow what in a ledger: one fold, used both to write an entry and to verify one."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from pipeline.privacy.composition import WHOLE, Charge, Spent
from pipeline.privacy.ledger.entries import (
    NO_DIGEST,
    FencedError,
    LedgerEntry,
    LedgerError,
    LedgerHead,
    ReserveExhausted,
)
from pipeline.privacy.mechanism import Mechanism

_PART = re.compile(r"[0-9a-f]{32}/[^/]+")
FINISH_REASONS = ("complete", "reserve_used_up")


@dataclass(kw_only=True)
class AttemptAccount:
    """One attempt at a phase: the steps it paid for are [first_step, next_step).

    Args:
        last_shown_step: up to where its results may have been seen: its furthest checkpoint.
    """

    number: int
    part: str
    first_step: int
    next_step: int
    last_shown_step: int
    is_seeded: bool
    is_finished: bool = False


@dataclass(kw_only=True)
class PhaseAccount:
    """What one phase of one run has paid and made.

    Args:
        mechanism: the promise all its attempts share.
        attempts: in order; only the last may write.
        num_charged_steps: over all attempts, lost steps included; never falls.
        next_step: one past the furthest step ever charged.
        weights: digest -> (step, kind) of what it made.
        finished: why it ended, or None.
    """

    run: str
    phase: str
    mechanism: Mechanism
    attempts: list[AttemptAccount] = field(default_factory=list)
    num_charged_steps: int = 0
    next_step: int = 0
    weights: dict[str, tuple[int, str]] = field(default_factory=dict)
    finished: str | None = None

    @property
    def num_steps_left(self) -> int:
        """How many steps may still be charged."""
        return self.mechanism.max_charged_steps - self.num_charged_steps

    @property
    def charges(self) -> list[Charge]:
        """What it paid, lost steps included, by the part of the domain that was sampled."""
        return [
            Charge(self.mechanism, attempt.next_step - attempt.first_step, attempt.part)
            for attempt in self.attempts
        ]

    @property
    def num_discarded_steps(self) -> int:
        """Steps whose results an attempt showed and the next one did not go on from.

        They led to nothing, yet whoever dropped them may have looked: going back is a choice.
        """
        return sum(
            max(0, dropped.last_shown_step - following.first_step)
            for dropped, following in pairwise(self.attempts)
        )

    @property
    def part(self) -> str:
        """The part that all its attempts sampled; WHOLE if they differ."""
        parts = {attempt.part for attempt in self.attempts}
        return parts.pop() if len(parts) == 1 else WHOLE


@dataclass(frozen=True, kw_only=True)
class Budget:
    """The most that all runs over a domain may spend together."""

    epsilon: float
    delta: float


class DomainState:
    """Everything the entries of a domain say, and what the next one may say.

    Guarantees:
        1. Steps of an attempt are charged in order, without gap or overlap, up to T; the total
           over attempts never passes T + reserve (test_hard_stop_at_the_last_step,
           test_reserve_is_a_hard_stop).
        2. Only the newest attempt of a phase may charge, name weights or finish
           (test_zombie_attempt_is_fenced).
        3. A key's commitment opens one attempt only, unless it is seeded
           (test_key_is_used_once).
    """

    def __init__(self, domain: str) -> None:
        self.domain = domain
        self.head = LedgerHead(index=-1, digest=NO_DIGEST)
        self.phases: dict[tuple[str, str], PhaseAccount] = {}
        self.commitments: dict[str, bool] = {}
        self.unprotected: list[tuple[str, str, str]] = []
        self.budget: Budget | None = None
        # What had been spent when each budget was last charged against: for verification.
        self.spent_under_budget: list[tuple[Budget, list[Charge]]] = []

    def check(self, kind: str, body: dict[str, Any]) -> None:
        """Raises a LedgerError unless an entry of `kind` with `body` may come next."""
        getattr(self, f"_check_{kind}")(body)

    def apply(self, entry: LedgerEntry) -> None:
        """Takes in the next entry, after checking its place and its content."""
        if entry.index != self.head.index + 1 or entry.previous != self.head.digest:
            raise LedgerError(
                f"ledger entry {entry.index} does not follow entry {self.head.index}: the chain "
                "is broken; entries were altered, reordered or removed; restore them from a copy"
            )
        try:
            self.check(entry.kind, entry.body)
        except LedgerError as error:
            raise type(error)(f"ledger entry {entry.index} breaks the rules: {error}") from error
        getattr(self, f"_apply_{entry.kind}")(entry.body)
        self.head = LedgerHead(index=entry.index, digest=entry.digest)

    def spent(self, accounts: Iterable[PhaseAccount] | None = None) -> Spent:
        """Returns (mechanism, charged steps), equal mechanisms counted together."""
        totals: dict[str, tuple[Mechanism, int]] = {}
        for account in self.phases.values() if accounts is None else accounts:
            key = account.mechanism.digest()
            _, steps = totals.get(key, (account.mechanism, 0))
            totals[key] = (account.mechanism, steps + account.num_charged_steps)
        return [(mechanism, steps) for mechanism, steps in totals.values() if steps > 0]

    def charges(self, run: str | None = None) -> list[Charge]:
        """Returns what all runs have paid, or one, by the part of the domain that was sampled."""
        accounts = [a for a in self.phases.values() if run in (None, a.run)]
        return [charge for account in accounts for charge in account.charges]

    def account(self, run: str, phase: str) -> PhaseAccount:
        """Returns the account of (run, phase), which must have an attempt."""
        account = self.phases.get((run, phase))
        if account is None:
            raise LedgerError(
                f"run {run!r}, phase {phase!r} has no attempt in domain {self.domain!r}; open one "
                "with Ledger.open_attempt"
            )
        return account

    def num_attempts(self, run: str, phase: str) -> int:
        """Returns how many attempts at (run, phase) there were."""
        account = self.phases.get((run, phase))
        return len(account.attempts) if account else 0

    def _check_attempt(self, body: dict[str, Any]) -> None:
        try:
            mechanism = Mechanism.from_json(body["mechanism"])
        except (ValueError, TypeError) as error:
            raise LedgerError(f"its mechanism is not valid: {error}") from error
        _require(
            body["mechanism_digest"] == mechanism.digest(), "mechanism_digest is not the digest"
        )
        commitment, is_seeded = body["key_commitment"], body["is_seeded"]
        _require(_is_digest(commitment), f"key_commitment {commitment!r} is no SHA-256 hex digest")
        _require(
            commitment not in self.commitments or (is_seeded and self.commitments[commitment]),
            "this key has opened an attempt before; every attempt draws a new one with "
            "AttemptKey.from_os_entropy",
        )
        for other in self.phases.values():
            for name in ("adjacency", "privacy_unit"):
                used, wanted = getattr(other.mechanism, name), getattr(mechanism, name)
                _require(
                    used == wanted,
                    f"{name} is {wanted}; domain {self.domain!r} holds runs with {used}, and only "
                    "equal ones compose to one statement: use the same",
                )
        account = self.phases.get((body["run"], body["phase"]))
        charged = account.next_step if account else 0
        number = self.num_attempts(body["run"], body["phase"])
        if account is not None and account.mechanism != mechanism:
            before, now = account.mechanism.to_json(), mechanism.to_json()
            changed = [f"{n} {before[n]} -> {now[n]}" for n in before if before[n] != now[n]]
            raise LedgerError(
                f"run {body['run']!r}, phase {body['phase']!r} began with another mechanism "
                f"({', '.join(changed)}); a phase keeps its promise: restore it, or start a new "
                "run under another name"
            )
        _require(body["attempt"] == number, f"attempt must be number {number}")
        _require(
            body["part"] == WHOLE or _PART.fullmatch(body["part"]) is not None,
            f"part is {body['part']!r}; it must be empty or PREPARATION/SPLIT",
        )
        _require(
            0 <= body["first_step"] <= charged,
            f"first_step is {body['first_step']}; the steps charged so far end at {charged}: "
            "an attempt starts at step 0 or resumes where charged steps lead",
        )

    def _apply_attempt(self, body: dict[str, Any]) -> None:
        account = self.phases.setdefault(
            (body["run"], body["phase"]),
            PhaseAccount(
                run=body["run"],
                phase=body["phase"],
                mechanism=Mechanism.from_json(body["mechanism"]),
            ),
        )
        account.attempts.append(
            AttemptAccount(
                number=body["attempt"],
                part=body["part"],
                first_step=body["first_step"],
                next_step=body["first_step"],
                last_shown_step=body["first_step"],
                is_seeded=body["is_seeded"],
            )
        )
        account.finished = None
        self.commitments[body["key_commitment"]] = body["is_seeded"]

    def _newest(self, body: dict[str, Any]) -> tuple[PhaseAccount, AttemptAccount]:
        """Returns the account and attempt that `body` writes for; raises if it is fenced."""
        account = self.account(body["run"], body["phase"])
        newest = account.attempts[-1]
        if body["attempt"] != newest.number:
            raise FencedError(
                f"attempt {body['attempt']} of run {body['run']!r}, phase {body['phase']!r} was "
                f"succeeded by attempt {newest.number}: another process runs this phase now, so "
                "this one ends; follow that one, or give this run another name"
            )
        return account, newest

    def _check_charge(self, body: dict[str, Any]) -> None:
        account, attempt = self._newest(body)
        first_step, num_steps, mechanism = body["first_step"], body["num_steps"], account.mechanism
        _require(num_steps >= 1, f"num_steps is {num_steps}; it must be >= 1")
        _require(not attempt.is_finished, "the attempt has finished; open a new one")
        _require(
            first_step == attempt.next_step,
            f"first_step is {first_step}; the next step of this attempt is {attempt.next_step}: "
            "steps are charged in order, each once",
        )
        _require(
            first_step + num_steps <= mechanism.num_steps,
            f"steps {first_step} to {first_step + num_steps} pass the last, {mechanism.num_steps}",
        )
        if num_steps > account.num_steps_left:
            raise ReserveExhausted(
                f"run {body['run']!r}, phase {body['phase']!r} has {account.num_steps_left} steps "
                f"left to charge of {mechanism.num_steps} + {mechanism.reserve_steps} in reserve, "
                f"and the next charge needs {num_steps}; it ends at its last checkpoint"
            )

    def _apply_charge(self, body: dict[str, Any]) -> None:
        account, attempt = self._newest(body)
        attempt.next_step += body["num_steps"]
        account.num_charged_steps += body["num_steps"]
        account.next_step = max(account.next_step, attempt.next_step)
        if self.budget is not None:
            spent = (self.budget, self.charges())
            if self.spent_under_budget and self.spent_under_budget[-1][0] is self.budget:
                self.spent_under_budget[-1] = spent
            else:
                self.spent_under_budget.append(spent)

    def _check_weights(self, body: dict[str, Any]) -> None:
        account = self.account(body["run"], body["phase"])
        _require(_is_digest(body["digest"]), f"digest {body['digest']!r} is no SHA-256 hex digest")
        _require(
            0 <= body["step"] <= account.next_step,
            f"weights of step {body['step']} cannot exist: steps are charged up to "
            f"{account.next_step}",
        )

    def _apply_weights(self, body: dict[str, Any]) -> None:
        account = self.account(body["run"], body["phase"])
        account.weights[body["digest"]] = (body["step"], body["weights_kind"])
        if body["weights_kind"] == "checkpoint":
            newest = account.attempts[-1]
            newest.last_shown_step = max(newest.last_shown_step, body["step"])

    def _check_finish(self, body: dict[str, Any]) -> None:
        account, attempt = self._newest(body)
        _require(
            body["reason"] in FINISH_REASONS,
            f"reason is {body['reason']!r}; it must be {' or '.join(FINISH_REASONS)}",
        )
        _require(not attempt.is_finished, "the attempt has finished before")
        last = account.mechanism.num_steps
        is_step_right = (
            body["step"] == last
            if body["reason"] == "complete"
            else attempt.first_step <= body["step"] < last
        )
        _require(
            is_step_right and body["step"] <= attempt.next_step,
            f"a phase of {last} steps, charged up to {attempt.next_step} by this attempt, cannot "
            f"end as {body['reason']!r} at step {body['step']}",
        )

    def _apply_finish(self, body: dict[str, Any]) -> None:
        account, attempt = self._newest(body)
        attempt.is_finished = True
        account.finished = body["reason"]

    def _check_unprotected(self, body: dict[str, Any]) -> None:
        _require(bool(body["reason"].strip()), "reason must say why the access is unprotected")

    def _apply_unprotected(self, body: dict[str, Any]) -> None:
        self.unprotected.append((body["run"], body["phase"], body["reason"]))

    def _check_budget(self, body: dict[str, Any]) -> None:
        _require(body["epsilon"] > 0, f"epsilon is {body['epsilon']}; it must be > 0")
        _require(0 < body["delta"] < 1, f"delta is {body['delta']}; it must be in (0, 1)")

    def _apply_budget(self, body: dict[str, Any]) -> None:
        self.budget = Budget(epsilon=body["epsilon"], delta=body["delta"])


def _is_digest(text: str) -> bool:
    return len(text) == 64 and set(text) <= set("0123456789abcdef")


def _require(is_allowed: bool, message: str) -> None:
    if not is_allowed:
        raise LedgerError(message)
