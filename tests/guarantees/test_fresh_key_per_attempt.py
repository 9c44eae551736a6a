"""A new in-memory key per attempt, never stored: no sample or noise comes twice (PITFALLS 4)."""

import os
from pathlib import Path

import numpy as np
import pytest

from pipeline.privacy.keys import AttemptKey
from pipeline.privacy.ledger import Ledger, LedgerError
from pipeline.privacy.mechanism import Mechanism
from pipeline.privacy.noise import KeyedNoise

MECHANISM = Mechanism(
    num_records=1_000,
    expected_batch_size=100,
    sampling_probability=0.1,
    noise_multiplier=1.0,
    max_grad_norm=1.0,
    num_steps=10,
    reserve_steps=10,
    delta=1e-5,
)


def open_attempt(ledger: Ledger, key: AttemptKey) -> None:
    ledger.open_attempt(
        run="run",
        phase="private",
        mechanism=MECHANISM,
        key_commitment=key.commitment(),
        first_step=0,
    )


def test_fresh_key_per_attempt() -> None:
    keys = [AttemptKey.from_os_entropy() for _ in range(200)]
    assert len({key.secret for key in keys}) == 200
    first, resumed = keys[:2]
    assert not np.array_equal(
        MECHANISM.plan(first.sampling_key()).record_ids(3),
        MECHANISM.plan(resumed.sampling_key()).record_ids(3),
    )
    noise = [
        KeyedNoise(noise_key=key.noise_key()).gaussian(3, 0, 1_000) for key in (first, resumed)
    ]
    assert abs(np.corrcoef(noise)[0, 1]) < 0.15
    assert not np.any(noise[0] == noise[1])


def test_forked_processes_draw_different_keys() -> None:
    """Two forks of one process (or of one checkpoint) share nothing that is drawn afterwards."""
    commitments = set()
    for _ in range(3):
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            os.write(writer, AttemptKey.from_os_entropy().commitment().encode())
            os._exit(0)
        os.close(writer)
        commitments.add(os.read(reader, 64))
        os.close(reader)
        os.waitpid(child, 0)
    assert len(commitments) == 3


def test_a_used_key_cannot_open_another_attempt(tmp_path: Path) -> None:
    ledger = Ledger(str(tmp_path), "photos")
    key = AttemptKey.from_os_entropy()
    open_attempt(ledger, key)
    with pytest.raises(LedgerError, match="opened an attempt before"):
        open_attempt(Ledger(str(tmp_path), "photos"), key)
    open_attempt(ledger, AttemptKey.from_os_entropy())


def test_ledger_holds_the_commitment_and_no_key(tmp_path: Path) -> None:
    key = AttemptKey.from_os_entropy()
    open_attempt(Ledger(str(tmp_path), "photos"), key)
    written = b"".join(path.read_bytes() for path in tmp_path.rglob("*.json"))
    assert key.commitment().encode() in written
    for secret in (key.secret, key.sampling_key(), key.augmentation_key(), key.noise_key()):
        assert secret not in written and secret.hex().encode() not in written
