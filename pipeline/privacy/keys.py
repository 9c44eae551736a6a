"""Attempt keys: where all secret randomness of a private phase comes from."""

from __future__ import annotations

import hashlib
import hmac
import secrets
from dataclasses import dataclass, field
from typing import NoReturn

KEY_BYTES = 32

_COMMITMENT = b"dp-pretrain/v1/commitment"
_SEEDED = b"dp-pretrain/v1/seeded, not private"


def derive(key: bytes, *label: bytes | int) -> bytes:
    """Returns a 32-byte sub-key of `key` for `label`; one-way (HMAC-SHA-256 as a PRF).

    Every part of the label carries its type and length, so that no two labels collide.
    """
    mac = hmac.new(key, digestmod=hashlib.sha256)
    for part in label:
        if isinstance(part, int):
            mac.update(b"i" + part.to_bytes(16, "big", signed=True))
        else:
            mac.update(b"b" + len(part).to_bytes(8, "big") + part)
    return mac.digest()


def checked_key(name: str, key: bytes) -> bytes:
    """Returns `key` if it is 32 bytes, else raises without showing it."""
    if not isinstance(key, bytes) or len(key) != KEY_BYTES:
        raise ValueError(
            f"{name} must be {KEY_BYTES} bytes (its value is not shown); "
            "take it from an AttemptKey: sampling_key(), augmentation_key() or noise_key()"
        )
    return key


@dataclass(frozen=True, kw_only=True)
class AttemptKey:
    """The 256-bit secret of one attempt at a phase; it lives in memory only.

    Args:
        secret: 32 bytes; only for sending from rank 0 to the other ranks, in memory.
        is_seeded: True if the secret follows from a published seed: NOT PRIVATE, tests only.

    Guarantees:
        1. Two keys from the operating system are never equal (test_fresh_key_per_attempt).
        2. Sampling, augmentation and noise sub-keys are independent, and no sub-key nor the
           commitment tells another or the secret (test_subkeys_are_separate).
        3. The secret is not shown by repr() and the key cannot be pickled or copied, so that
           it reaches no log, checkpoint or run state (test_key_stays_in_memory).
    """

    secret: bytes = field(repr=False)
    is_seeded: bool = False

    def __post_init__(self) -> None:
        checked_key("secret", self.secret)

    @classmethod
    def from_os_entropy(cls) -> AttemptKey:
        """Returns a new key drawn from the operating system."""
        return cls(secret=secrets.token_bytes(KEY_BYTES))

    @classmethod
    def seeded(cls, seed: int) -> AttemptKey:
        """Returns the key that follows from `seed`; everything made from it is NOT PRIVATE."""
        return cls(secret=derive(_SEEDED, int(seed)), is_seeded=True)

    @classmethod
    def from_bytes(cls, secret: bytes, *, is_seeded: bool = False) -> AttemptKey:
        """Returns the key another rank sent as `secret` (with its `is_seeded` mark)."""
        return cls(secret=secret, is_seeded=is_seeded)

    def commitment(self) -> str:
        """Returns the SHA-256 hex digest that names this key in the ledger."""
        return hashlib.sha256(_COMMITMENT + self.secret).hexdigest()

    def sampling_key(self) -> bytes:
        """Returns the 32-byte sub-key that decides which records a step takes."""
        return derive(self.secret, b"sampling")

    def augmentation_key(self) -> bytes:
        """Returns the 32-byte sub-key of crops, flips and masks."""
        return derive(self.secret, b"augmentation")

    def noise_key(self) -> bytes:
        """Returns the 32-byte sub-key of the Gaussian noise; never given to a data task."""
        return derive(self.secret, b"noise")

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise TypeError(
            "an AttemptKey cannot be pickled or copied, so that it is never written; broadcast "
            "its `secret` in memory and rebuild it with AttemptKey.from_bytes"
        )
