"""One ledger entry, its digest, and the errors of a ledger."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

VERSION = 1
NO_DIGEST = "0" * 64

BODY_FIELDS: Mapping[str, Mapping[str, type]] = {
    "attempt": {
        "run": str,
        "phase": str,
        "attempt": int,
        "mechanism": dict,
        "mechanism_digest": str,
        "key_commitment": str,
        "part": str,
        "first_step": int,
        "is_seeded": bool,
    },
    "charge": {"run": str, "phase": str, "attempt": int, "first_step": int, "num_steps": int},
    "weights": {"run": str, "phase": str, "step": int, "digest": str, "weights_kind": str},
    "finish": {"run": str, "phase": str, "attempt": int, "reason": str, "step": int},
    "unprotected": {"run": str, "phase": str, "reason": str},
    "budget": {"epsilon": float, "delta": float},
}


_RESTORE = "restore the domain's entries from a copy, each under its own name"


class LedgerError(ValueError):
    """The ledger, or what was asked of it, is not in order; nothing was charged."""


class LedgerStorageError(LedgerError):
    """The ledger's storage failed, or cannot be the home of a ledger."""


class FencedError(LedgerError):
    """A newer attempt at the same phase exists: this one must end at once."""


class ReserveExhausted(LedgerError):
    """The phase has no steps left to charge: it ends, validly, at its last checkpoint."""


class BudgetExceeded(LedgerError):
    """The charge would take the privacy domain over its budget."""


@dataclass(frozen=True, kw_only=True)
class LedgerHead:
    """The last entry's index and digest; index -1 for an empty ledger."""

    index: int
    digest: str


@dataclass(frozen=True, kw_only=True)
class LedgerEntry:
    """One entry of a domain's ledger.

    Args:
        domain: the privacy domain it belongs to.
        index: its place, from 0.
        previous: digest of the entry before it (64 zeros for the first).
        kind: attempt, charge, weights, finish, unprotected or budget.
        written_at: UTC time to the minute, ISO 8601; informative only.
        body: the fields of its kind (`BODY_FIELDS`), no others.
        signature: HMAC of the digest (signing.py), where the writer had a key; outside the
            digest, so that the chain holds for readers without it.
    """

    domain: str
    index: int
    previous: str
    kind: str
    written_at: str
    body: dict[str, Any]
    signature: str | None = None

    def __post_init__(self) -> None:
        fields = BODY_FIELDS.get(self.kind)
        if fields is None:
            raise LedgerError(
                f"ledger entry {self.index} has the unknown kind {self.kind!r}; known are "
                f"{', '.join(BODY_FIELDS)}: use the version of dp-pretrain that wrote it"
            )
        is_right = set(self.body) == set(fields) and all(
            type(self.body[name]) is kind for name, kind in fields.items()
        )
        if not is_right:
            raise LedgerError(
                f"ledger entry {self.index} of kind {self.kind} must have exactly the fields "
                f"{', '.join(f'{name}: {kind.__name__}' for name, kind in fields.items())}"
            )

    @property
    def digest(self) -> str:
        """SHA-256 of the canonical JSON of everything in the entry; what the next one names."""
        return hashlib.sha256(_canonical(self._fields())).hexdigest()

    def to_bytes(self) -> bytes:
        """Returns the stored object: canonical JSON with the digest in it, one line."""
        signed = {} if self.signature is None else {"signature": self.signature}
        return _canonical({**self._fields(), **signed, "digest": self.digest}) + b"\n"

    @classmethod
    def from_bytes(cls, content: bytes, *, domain: str, index: int) -> LedgerEntry:
        """Returns the entry of a stored object.

        Raises:
            LedgerError: unless the bytes are exactly what `to_bytes` writes at this place.
        """
        try:
            record = json.loads(content)
            entry = cls(
                domain=record["domain"],
                index=record["index"],
                previous=record["previous"],
                kind=record["kind"],
                written_at=record["written_at"],
                body=record["body"],
                signature=record.get("signature"),
            )
            is_intact = entry.to_bytes() == content
        except LedgerError:
            raise
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise LedgerError(f"ledger entry {index} cannot be read: {error}; {_RESTORE}") from None
        if not is_intact:
            raise LedgerError(
                f"ledger entry {index} was altered: its digest does not fit it; {_RESTORE}"
            )
        if (entry.domain, entry.index) != (domain, index):
            raise LedgerError(
                f"ledger entry {index} of domain {domain} is entry {entry.index} of domain "
                f"{entry.domain}: entries were moved or reordered; {_RESTORE}"
            )
        return entry

    def _fields(self) -> dict[str, Any]:
        return {
            "version": VERSION,
            "domain": self.domain,
            "index": self.index,
            "previous": self.previous,
            "kind": self.kind,
            "written_at": self.written_at,
            "body": self.body,
        }


def _canonical(record: Mapping[str, Any]) -> bytes:
    return json.dumps(record, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()
