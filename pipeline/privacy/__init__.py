"""What is promised: mechanism, accounting, keys, sampling, noise, ledger, statement.

The public face is listed below and loaded on first use, so that a data task that only needs the
sampler does not wait for the accountant's imports.
"""

from __future__ import annotations

import importlib
from typing import Any

_HOME = {
    "Adjacency": "mechanism",
    "BrokenPromise": "mechanism",
    "Mechanism": "mechanism",
    "default_delta": "mechanism",
    "default_reserve_steps": "mechanism",
    "Epsilon": "accountant",
    "calibrate_noise_multiplier": "accountant",
    "epsilon_of": "accountant",
    "calibrate_batch_size": "solve",
    "calibrate_num_steps": "solve",
    "AttemptKey": "keys",
    "PoissonPlan": "sampling",
    "ShufflePlan": "sampling",
    "checksum": "sampling",
    "expected_coverage": "sampling",
    "record_uniforms": "sampling",
    "view_uniforms": "sampling",
    "KeyedNoise": "noise",
    "Attempt": "ledger",
    "BudgetExceeded": "ledger",
    "FencedError": "ledger",
    "Ledger": "ledger",
    "LedgerEntry": "ledger",
    "LedgerError": "ledger",
    "LedgerHead": "ledger",
    "ReserveExhausted": "ledger",
    "LedgerReport": "ledger",
    "LedgerStorageError": "ledger",
    "LineageStep": "statement",
    "build_statement": "statement",
    "statement_text": "statement",
}

__all__ = sorted(_HOME)  # noqa: PLE0605 - the one list is the table above


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
