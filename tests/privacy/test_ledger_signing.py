"""Signed ledgers: with the key a forger is found out; without it the chain still checks."""

from __future__ import annotations

import dataclasses
import hashlib
import hmac
import json
from pathlib import Path

import pytest

from pipeline.privacy.keys import AttemptKey
from pipeline.privacy.ledger import Ledger, LedgerError
from pipeline.privacy.ledger.entries import LedgerEntry
from pipeline.privacy.ledger.signing import KEY_FILE_VARIABLE, signature
from pipeline.privacy.mechanism import Mechanism

KEY, OTHER = bytes(range(32)), bytes(32)
MECHANISM = Mechanism(
    num_records=1_000,
    expected_batch_size=20,
    sampling_probability=0.02,
    noise_multiplier=1.0,
    max_grad_norm=1.0,
    num_steps=20,
    delta=1e-4,
)


def charge(ledger: Ledger, run: str = "run") -> None:
    attempt = ledger.open_attempt(
        run=run,
        phase="private",
        mechanism=MECHANISM,
        key_commitment=AttemptKey.from_os_entropy().commitment(),
        first_step=0,
    )
    attempt.charge(0, 10)
    attempt.charge(10, 10)


@pytest.fixture
def key_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "key"
    path.touch(mode=0o600)
    path.write_bytes(KEY)
    monkeypatch.setenv(KEY_FILE_VARIABLE, str(path))
    return path


def forge(folder: Path, key: bytes | None) -> None:
    """Rewrites the whole chain with half the steps charged: every digest and link is right."""
    previous = "0" * 64
    for path in sorted(folder.glob("*.json")):
        entry = LedgerEntry.from_bytes(path.read_bytes(), domain="photos", index=int(path.stem))
        body = dict(entry.body)
        if entry.kind == "charge":
            body["num_steps"], body["first_step"] = 5, body["first_step"] // 2
        entry = dataclasses.replace(entry, previous=previous, body=body, signature=entry.signature)
        if key is not None:
            entry = dataclasses.replace(entry, signature=signature(entry, key))
        previous = entry.digest
        path.write_bytes(entry.to_bytes())


def test_signed_entries_by_hand(tmp_path: Path, key_file: Path) -> None:
    charge(Ledger(str(tmp_path), "photos"))
    for path in sorted((tmp_path / "photos").glob("*.json")):
        record = json.loads(path.read_bytes())
        expected = hmac.new(KEY, record["digest"].encode(), hashlib.sha256).hexdigest()
        assert record["signature"] == expected
        assert KEY not in path.read_bytes() and KEY.hex().encode() not in path.read_bytes()
    assert Ledger(str(tmp_path), "photos").verify().num_entries == 3


def test_the_chain_by_hand(tmp_path: Path, key_file: Path) -> None:
    """As pipeline/privacy/README.md says how to check it."""
    charge(Ledger(str(tmp_path), "photos"), "rün")
    previous = "0" * 64
    for path in sorted((tmp_path / "photos").glob("*.json")):
        record = json.loads(path.read_text("ascii"))
        fields = {k: v for k, v in record.items() if k not in ("digest", "signature")}
        text = json.dumps(fields, sort_keys=True, separators=(",", ":"))
        assert record["digest"] == hashlib.sha256(text.encode()).hexdigest()
        assert record["previous"] == previous
        previous = record["digest"]


@pytest.mark.parametrize("how", ["old signatures", "another key", "no signatures"])
def test_forged_entries_are_refused_with_the_key(
    tmp_path: Path, key_file: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    charge(Ledger(str(tmp_path), "photos"))
    forge(tmp_path / "photos", OTHER if how == "another key" else None)
    if how == "no signatures":
        for path in (tmp_path / "photos").glob("*.json"):
            record = json.loads(path.read_bytes())
            del record["signature"]
            text = json.dumps(record, sort_keys=True, separators=(",", ":"))
            path.write_bytes(text.encode() + b"\n")
    with pytest.raises(LedgerError, match="not signed"):
        Ledger(str(tmp_path), "photos").verify()
    monkeypatch.delenv(KEY_FILE_VARIABLE)
    report = Ledger(str(tmp_path), "photos").verify()  # what a chain alone cannot tell
    assert report.phases[0].num_charged_steps == 10


def test_without_the_key_it_is_read_and_not_written(
    tmp_path: Path, key_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    charge(Ledger(str(tmp_path), "photos"))
    monkeypatch.delenv(KEY_FILE_VARIABLE)
    ledger = Ledger(str(tmp_path), "photos")
    assert ledger.verify().phases[0].num_charged_steps == 20
    with pytest.raises(LedgerError, match=f"are signed, .* set {KEY_FILE_VARIABLE}"):
        charge(ledger, "other")
    assert len(ledger.entries()) == 3
    path = tmp_path / "photos" / "00000001.json"
    path.write_bytes(path.read_bytes().replace(b'"num_steps":10', b'"num_steps":1'))
    with pytest.raises(LedgerError, match="was altered"):
        Ledger(str(tmp_path), "photos").verify()


def test_a_ledger_begun_without_a_key_is_not_taken_for_signed(
    tmp_path: Path, key_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(KEY_FILE_VARIABLE)
    charge(Ledger(str(tmp_path), "photos"))
    monkeypatch.setenv(KEY_FILE_VARIABLE, str(key_file))
    with pytest.raises(LedgerError, match="entry 0 of domain 'photos' is not signed"):
        charge(Ledger(str(tmp_path), "photos"), "other")
    assert len(list((tmp_path / "photos").glob("*.json"))) == 3


def test_unusable_keys_are_refused(tmp_path: Path, key_file: Path) -> None:
    for mode in (0o640, 0o604, 0o666):
        key_file.chmod(mode)
        with pytest.raises(LedgerError, match=f"of mode {mode:04o}: others may read"):
            Ledger(str(tmp_path), "photos")
    key_file.chmod(0o600)
    key_file.write_bytes(bytes(31))
    with pytest.raises(LedgerError, match="a file of 31 bytes; it must hold at least 32"):
        Ledger(str(tmp_path), "photos")
    key_file.unlink()
    with pytest.raises(LedgerError, match="cannot be read"):
        Ledger(str(tmp_path), "photos")
