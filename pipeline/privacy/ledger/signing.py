"""An optional key with which writers sign entries, kept apart from the ledger's storage."""

from __future__ import annotations

import hashlib
import hmac
import os
import stat
from pathlib import Path

from pipeline.privacy.ledger.entries import LedgerEntry, LedgerError

KEY_FILE_VARIABLE = "DP_PRETRAIN_LEDGER_KEY_FILE"
MIN_KEY_BYTES = 32


def key_from_environment() -> bytes | None:
    """Returns the content of the file that DP_PRETRAIN_LEDGER_KEY_FILE names, None if it is unset.

    Raises:
        LedgerError: if the file cannot be read, is readable by others than its owner, or is
            shorter than 32 bytes. An unusable key is never the same as none.
    """
    name = os.environ.get(KEY_FILE_VARIABLE)
    if name is None:
        return None
    remedy = (
        f"make one with: (umask 077; head -c 32 /dev/urandom > FILE), or unset {KEY_FILE_VARIABLE}"
    )
    try:
        with Path(name).expanduser().open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            key = file.read()
    except OSError as error:
        raise LedgerError(
            f"{KEY_FILE_VARIABLE} is {name!r}: cannot be read ({error.strerror}); {remedy}"
        ) from None
    if stat.S_IMODE(mode) & 0o077:
        raise LedgerError(
            f"{KEY_FILE_VARIABLE} is {name!r}, of mode {stat.S_IMODE(mode):04o}: others may read "
            "it; allowed is 0600: chmod 600 it, and make a new key if anybody did"
        )
    if len(key) < MIN_KEY_BYTES:
        raise LedgerError(
            f"{KEY_FILE_VARIABLE} is {name!r}, a file of {len(key)} bytes; it must hold at least "
            f"{MIN_KEY_BYTES}: {remedy}"
        )
    return key


def signature(entry: LedgerEntry, key: bytes) -> str:
    """Returns HMAC-SHA256 (hex) under `key` of the entry's digest, as its 64 ASCII characters."""
    return hmac.new(key, entry.digest.encode(), hashlib.sha256).hexdigest()


def require_signature(entry: LedgerEntry, key: bytes) -> None:
    """Raises a LedgerError unless `entry` was signed with `key`."""
    found = entry.signature
    if found is None:
        raise LedgerError(
            f"ledger entry {entry.index} of domain {entry.domain!r} is not signed: it was written "
            f"without the key, or its signature was removed. Unset {KEY_FILE_VARIABLE} to check a "
            "ledger that was begun without one"
        )
    if not hmac.compare_digest(found, signature(entry, key)):
        raise LedgerError(
            f"ledger entry {entry.index} of domain {entry.domain!r} was not signed with this key: "
            f"it is forged, or {KEY_FILE_VARIABLE} names the key of another ledger"
        )
