"""The write-ahead, hash-chained record of what a privacy domain has paid.

`entries.py` is one entry and the chain, `rules.py` what may follow what, `home.py` storage that can
create an object only if it is absent, `signing.py` the optional key, `book.py` the ledger and the
attempts that write to it.
"""

from pipeline.privacy.ledger.book import Attempt, Ledger, LedgerReport
from pipeline.privacy.ledger.entries import (
    BudgetExceeded,
    FencedError,
    LedgerEntry,
    LedgerError,
    LedgerHead,
    LedgerStorageError,
    ReserveExhausted,
)
from pipeline.privacy.ledger.home import known_domains
from pipeline.privacy.ledger.rules import PhaseAccount

__all__ = [
    "Attempt",
    "BudgetExceeded",
    "FencedError",
    "Ledger",
    "LedgerEntry",
    "LedgerError",
    "LedgerHead",
    "LedgerReport",
    "LedgerStorageError",
    "PhaseAccount",
    "ReserveExhausted",
    "known_domains",
]
