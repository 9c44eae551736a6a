"""Attempt keys: separate one-way sub-keys that stay in memory."""

import copy
import hashlib
import pickle

import pytest

from pipeline.privacy.keys import AttemptKey, derive


def subkeys(key: AttemptKey) -> list[bytes]:
    return [key.sampling_key(), key.augmentation_key(), key.noise_key()]


def test_subkeys_are_separate() -> None:
    key, other = AttemptKey.seeded(1), AttemptKey.seeded(2)
    found = [*subkeys(key), *subkeys(other), key.secret, other.secret]
    found += [bytes.fromhex(k.commitment()) for k in (key, other)]
    assert len(set(found)) == len(found)
    assert all(len(value) == 32 for value in found)


def test_subkeys_are_a_pure_function_of_the_secret() -> None:
    key = AttemptKey.from_os_entropy()
    again = AttemptKey.from_bytes(key.secret)
    assert subkeys(key) == subkeys(again)
    assert key.commitment() == again.commitment()


def test_commitment_is_not_the_digest_of_a_subkey() -> None:
    key = AttemptKey.seeded(3)
    digests = {hashlib.sha256(value).hexdigest() for value in subkeys(key)}
    assert key.commitment() not in digests


def test_derive_separates_labels() -> None:
    key = bytes(32)
    labels = [(b"ab", b"c"), (b"a", b"bc"), (b"abc",), (1, 2), (12,), (b"1",), (1,), (-1,)]
    assert len({derive(key, *label) for label in labels}) == len(labels)


def test_seeded_is_marked() -> None:
    assert AttemptKey.seeded(0).is_seeded
    assert not AttemptKey.from_os_entropy().is_seeded
    assert AttemptKey.from_bytes(AttemptKey.seeded(0).secret, is_seeded=True).is_seeded


def test_key_stays_in_memory() -> None:
    key = AttemptKey.from_os_entropy()
    for text in (repr(key), str(key), f"{key}"):
        assert key.secret.hex() not in text
        assert repr(key.secret) not in text
    for duplicate in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(TypeError, match="never written"):
            duplicate(key)


@pytest.mark.parametrize("secret", [b"", bytes(31), bytes(33), "x" * 32, bytearray(32)])
def test_wrong_secret_is_refused_and_not_shown(secret: bytes) -> None:
    with pytest.raises(ValueError, match="secret must be 32 bytes") as error:
        AttemptKey.from_bytes(secret)
    assert "x" * 32 not in str(error.value)
