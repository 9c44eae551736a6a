"""The ledger's rules, its storage, and what its readers are told."""

import dataclasses
import errno
import json
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.request import Request, urlopen

import pytest
from obstore.store import MemoryStore

from pipeline.privacy import ledger as ledger_module
from pipeline.privacy.keys import AttemptKey
from pipeline.privacy.ledger import (
    Attempt,
    BudgetExceeded,
    FencedError,
    Ledger,
    LedgerError,
    LedgerHead,
    LedgerStorageError,
    ReserveExhausted,
)
from pipeline.privacy.ledger.home import ObjectHome, open_home
from pipeline.privacy.mechanism import Mechanism

MECHANISM = Mechanism(
    num_records=1_000,
    expected_batch_size=10,
    sampling_probability=0.01,
    noise_multiplier=1.0,
    max_grad_norm=1.0,
    num_steps=20,
    reserve_steps=10,
    delta=1e-5,
)
DIGEST = "ab" * 32


def start(
    ledger: Ledger,
    run: str = "run",
    *,
    first_step: int = 0,
    mechanism: Mechanism = MECHANISM,
    phase: str = "private",
    seed: int | None = None,
) -> Attempt:
    key = AttemptKey.from_os_entropy() if seed is None else AttemptKey.seeded(seed)
    return ledger.open_attempt(
        run=run,
        phase=phase,
        mechanism=mechanism,
        key_commitment=key.commitment(),
        first_step=first_step,
        is_seeded=key.is_seeded,
    )


@pytest.fixture(params=["local", "object"])
def ledger(request: pytest.FixtureRequest, tmp_path: Path) -> Ledger:
    if request.param == "local":
        return Ledger(str(tmp_path / "ledgers"), "photos")
    return Ledger(ObjectHome(MemoryStore(), "photos"), "photos")


# One undisturbed run


def test_one_run(ledger: Ledger) -> None:
    assert ledger.head() == LedgerHead(index=-1, digest="0" * 64)
    assert ledger.entries() == [] and ledger.spent() == [] and not ledger.has_unprotected
    attempt = start(ledger)
    assert (attempt.number, attempt.first_step, attempt.is_seeded) == (0, 0, False)
    for first_step in (0, 10):
        attempt.charge(first_step, 10)
        attempt.record_weights(first_step + 10, f"{first_step:064x}", "checkpoint")
    head = attempt.finish("complete", 20)
    ledger.record_weights(run="run", phase="private", step=20, digest=DIGEST, kind="export")

    kinds = [entry.kind for entry in ledger.entries()]
    assert kinds == ["attempt", "charge", "weights", "charge", "weights", "finish", "weights"]
    assert ledger.entries()[head.index].digest == head.digest
    assert ledger.spent() == ledger.spent_by("run") == [(MECHANISM, 20)]
    (account,) = ledger.accounts()
    assert (account.finished, account.num_charged_steps) == ("complete", 20)
    report = ledger.verify(weights_digest=DIGEST, head=head)
    assert ledger.weights_named(DIGEST) == [("run", "private", 20)]
    assert report.is_total_bounded and report.num_entries == 7
    assert report.epsilon is not None and report.epsilon.value > 0


def test_another_reader_sees_the_same(tmp_path: Path) -> None:
    writer = Ledger(str(tmp_path), "photos")
    reader = Ledger(f"file://{tmp_path}", "photos")
    attempt = start(writer)
    assert len(reader.entries()) == 1
    attempt.charge(0, 5)
    assert reader.spent() == [(MECHANISM, 5)]
    assert reader.head() == writer.head()
    assert sorted(os.listdir(tmp_path / "photos")) == ["00000000.json", "00000001.json"]


def test_spent_by_run_and_phase(ledger: Ledger) -> None:
    other = dataclasses.replace(MECHANISM, noise_multiplier=2.0)
    start(ledger, "a").charge(0, 3)
    start(ledger, "a", phase="second", mechanism=other).charge(0, 4)
    start(ledger, "b").charge(0, 5)
    assert ledger.spent() == [(MECHANISM, 8), (other, 4)]
    assert ledger.spent_by("a") == [(MECHANISM, 3), (other, 4)]
    assert ledger.spent_by("a", "second") == [(other, 4)]
    assert ledger.spent_by("c") == []


# Rules of one phase


def test_hard_stop_at_the_last_step(ledger: Ledger) -> None:
    attempt = start(ledger)
    attempt.charge(0, 19)
    with pytest.raises(LedgerError, match="pass the last, 20"):
        attempt.charge(19, 2)
    attempt.charge(19, 1)
    with pytest.raises(LedgerError, match="pass the last"):
        attempt.charge(20, 1)
    assert ledger.spent() == [(MECHANISM, 20)]


@pytest.mark.parametrize(("first_step", "num_steps"), [(4, 2), (6, 2), (0, 5), (5, 0), (5, -1)])
def test_steps_are_charged_in_order(ledger: Ledger, first_step: int, num_steps: int) -> None:
    attempt = start(ledger)
    attempt.charge(0, 5)
    with pytest.raises(LedgerError):
        attempt.charge(first_step, num_steps)
    assert ledger.spent() == [(MECHANISM, 5)]
    attempt.charge(5, 1)


def test_reserve_is_a_hard_stop(ledger: Ledger) -> None:
    start(ledger).charge(0, 10)
    start(ledger, first_step=0).charge(0, 10)  # lost ten steps: the reserve pays
    third = start(ledger, first_step=10)
    third.charge(10, 9)
    with pytest.raises(ReserveExhausted, match="1 steps left to charge of 20 \\+ 10"):
        start(ledger, first_step=10).charge(10, 2)
    assert ledger.spent() == [(MECHANISM, 29)]
    last = start(ledger, first_step=19)
    last.charge(19, 1)
    last.finish("complete", 20)
    assert ledger.spent() == [(MECHANISM, 30)]
    with pytest.raises(ReserveExhausted):
        start(ledger, first_step=19).charge(19, 1)


def test_early_valid_end(ledger: Ledger) -> None:
    start(ledger).charge(0, 20)
    attempt = start(ledger, first_step=5)
    with pytest.raises(ReserveExhausted):
        attempt.charge(5, 15)
    attempt.finish("reserve_used_up", 5)
    assert ledger.accounts()[0].finished == "reserve_used_up"


@pytest.mark.parametrize(
    ("reason", "step"),
    [("complete", 19), ("complete", 21), ("reserve_used_up", 20), ("tired", 10), ("complete", 20)],
)
def test_ends_that_are_not(ledger: Ledger, reason: str, step: int) -> None:
    attempt = start(ledger)
    attempt.charge(0, 10)
    with pytest.raises(LedgerError):
        attempt.finish(reason, step)


def test_a_finished_attempt_writes_no_more(ledger: Ledger) -> None:
    attempt = start(ledger)
    attempt.charge(0, 10)
    attempt.finish("reserve_used_up", 10)
    with pytest.raises(LedgerError, match="has finished"):
        attempt.charge(10, 1)
    with pytest.raises(LedgerError, match="finished before"):
        attempt.finish("reserve_used_up", 10)


def test_zombie_attempt_is_fenced(ledger: Ledger) -> None:
    zombie = start(ledger)
    zombie.charge(0, 5)
    newer = start(ledger, first_step=5)
    for act in (
        lambda: zombie.charge(5, 5),
        lambda: zombie.record_weights(5, DIGEST, "checkpoint"),
        lambda: zombie.finish("reserve_used_up", 5),
    ):
        with pytest.raises(FencedError, match="succeeded by attempt 1"):
            act()
    newer.charge(5, 5)
    assert ledger.spent() == [(MECHANISM, 10)]


def test_forked_attempt_is_fenced(ledger: Ledger) -> None:
    original = start(ledger)
    original.charge(0, 5)
    copy = Attempt(ledger=ledger, run="run", phase="private")
    copy._next_step = 5  # as a forked or restored process would have it
    original.charge(5, 5)
    for act in (lambda: copy.charge(5, 5), lambda: copy.record_weights(5, DIGEST, "checkpoint")):
        with pytest.raises(FencedError, match="a copy of this process"):
            act()


def test_resume_beyond_what_was_charged_is_refused(ledger: Ledger) -> None:
    with pytest.raises(LedgerError, match="first_step is 1"):
        start(ledger, first_step=1)
    start(ledger).charge(0, 5)
    with pytest.raises(LedgerError, match="end at 5"):
        start(ledger, first_step=6)
    start(ledger, first_step=5)


def test_key_is_used_once(ledger: Ledger) -> None:
    key = AttemptKey.from_os_entropy()

    def open_with_key(*, is_seeded: bool) -> None:
        ledger.open_attempt(
            run="run",
            phase="private",
            mechanism=MECHANISM,
            key_commitment=key.commitment(),
            first_step=0,
            is_seeded=is_seeded,
        )

    open_with_key(is_seeded=False)
    for is_seeded in (False, True):
        with pytest.raises(LedgerError, match="this key has opened an attempt before"):
            open_with_key(is_seeded=is_seeded)
    start(ledger, seed=3)
    start(ledger, seed=3)


def test_a_phase_keeps_its_mechanism(ledger: Ledger) -> None:
    start(ledger)
    less_noise = dataclasses.replace(MECHANISM, noise_multiplier=0.9)
    with pytest.raises(LedgerError, match=r"noise_multiplier 1.0 -> 0.9"):
        start(ledger, mechanism=less_noise)
    start(ledger, "another run", mechanism=less_noise)


def test_a_domain_keeps_its_adjacency_and_unit(ledger: Ledger) -> None:
    start(ledger)
    hidden_n = dataclasses.replace(MECHANISM, adjacency="add_or_remove_one", num_records=None)
    pairs = dataclasses.replace(MECHANISM, privacy_unit="group_of_2")
    for mechanism in (hidden_n, pairs):
        with pytest.raises(LedgerError, match="compose to one statement"):
            start(ledger, "other", mechanism=mechanism)


def test_weights_of_uncharged_steps_are_refused(ledger: Ledger) -> None:
    attempt = start(ledger)
    attempt.charge(0, 5)
    with pytest.raises(LedgerError, match="charged up to 5"):
        attempt.record_weights(6, DIGEST, "checkpoint")
    with pytest.raises(LedgerError, match="no SHA-256"):
        attempt.record_weights(5, "short", "checkpoint")
    with pytest.raises(LedgerError, match="has no attempt"):
        ledger.record_weights(run="other", phase="private", step=0, digest=DIGEST, kind="export")


# Budget, unprotected access


def test_budget_over_all_runs(ledger: Ledger) -> None:
    costly = dataclasses.replace(
        MECHANISM, expected_batch_size=100, sampling_probability=0.1, reserve_steps=0
    )
    ledger.set_budget(4.0, 1e-5)
    first = start(ledger, "first", mechanism=costly)
    first.charge(0, 20)
    second = start(ledger, "second", mechanism=dataclasses.replace(costly, num_steps=5))
    before = ledger.head()
    with pytest.raises(BudgetExceeded, match=r"over its budget of 4\.0"):
        start(ledger, "third", mechanism=dataclasses.replace(costly, num_steps=200))
    ledger.set_budget(2.0, 1e-5)  # below what is spent: freezes the domain
    with pytest.raises(BudgetExceeded):
        second.charge(0, 5)
    assert ledger.head().index == before.index + 1
    ledger.set_budget(4.0, 1e-5)
    second.charge(0, 5)
    report = ledger.verify()
    assert report.budget is not None and report.budget.epsilon == 4.0
    assert report.epsilon is not None and report.epsilon.value <= 4.0


@pytest.mark.parametrize(("epsilon", "delta"), [(0.0, 1e-5), (8.0, 0.0), (8.0, 1.0), (-1, 0.5)])
def test_senseless_budgets_are_refused(ledger: Ledger, epsilon: float, delta: float) -> None:
    with pytest.raises(LedgerError):
        ledger.set_budget(epsilon, delta)


def test_unprotected_access_is_indelible(ledger: Ledger) -> None:
    start(ledger).charge(0, 5)
    assert ledger.verify().is_total_bounded
    ledger.record_unprotected("rehearsal", "private", "--unprotected")
    start(ledger, "later").charge(0, 5)
    assert ledger.has_unprotected
    assert not ledger.verify().is_total_bounded
    with pytest.raises(LedgerError, match="reason"):
        ledger.record_unprotected("rehearsal", "private", " ")


def test_seeded_attempt_unbounds_the_total(ledger: Ledger) -> None:
    assert start(ledger, seed=1).is_seeded
    assert ledger.has_unprotected


# Tampering


def filled(folder: Path) -> Ledger:
    ledger = Ledger(str(folder), "photos")
    attempt = start(ledger)
    attempt.charge(0, 10)
    attempt.record_weights(10, DIGEST, "checkpoint")
    attempt.charge(10, 10)
    attempt.finish("complete", 20)
    return ledger


def entry_path(folder: Path, index: int) -> Path:
    return folder / "photos" / f"{index:08d}.json"


def swap(folder: Path, a: int, b: int) -> None:
    first, second = entry_path(folder, a), entry_path(folder, b)
    content = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(content)


def edit(folder: Path, index: int, old: bytes, new: bytes) -> None:
    content = entry_path(folder, index).read_bytes()
    assert old in content
    entry_path(folder, index).write_bytes(content.replace(old, new))


@pytest.mark.parametrize(
    ("tamper", "message"),
    [
        (lambda f: edit(f, 1, b'"num_steps":10', b'"num_steps":1'), "was altered"),
        (lambda f: edit(f, 0, b'"noise_multiplier":1.0', b'"noise_multiplier":9.0'), "altered"),
        (lambda f: edit(f, 1, b'"version":1', b'"version": 1'), "was altered"),
        (lambda f: entry_path(f, 1).write_bytes(b"{"), "cannot be read"),
        (lambda f: entry_path(f, 1).write_bytes(b"[]"), "cannot be read"),
        (lambda f: entry_path(f, 4).write_bytes(b""), "cannot be read"),
        (lambda f: swap(f, 1, 3), "moved or reordered"),
        (lambda f: entry_path(f, 1).unlink(), "lacks entry 1"),
        (lambda f: entry_path(f, 0).unlink(), "lacks entry 0"),
        (lambda f: edit(f, 1, b'"kind":"charge"', b'"kind":"gift"'), "unknown kind"),
    ],
)
def test_tampering_is_refused(tmp_path: Path, tamper: object, message: str) -> None:
    filled(tmp_path)
    assert callable(tamper)
    tamper(tmp_path)
    ledger = Ledger(str(tmp_path), "photos")
    for read in (ledger.verify, ledger.entries, ledger.spent, lambda: start(ledger, "new")):
        with pytest.raises(LedgerError, match=message):
            read()


def test_consistent_forgery_of_one_entry_breaks_the_chain(tmp_path: Path) -> None:
    """An entry rewritten with a fitting digest of its own no longer fits the next."""
    entry = filled(tmp_path).entries()[1]
    forged = dataclasses.replace(entry, written_at="1970-01-01T00:00:00+00:00")
    entry_path(tmp_path, 1).write_bytes(forged.to_bytes())
    with pytest.raises(LedgerError, match="chain is broken"):
        Ledger(str(tmp_path), "photos").verify()


def test_rules_hold_for_what_is_read(tmp_path: Path) -> None:
    """A chain that fits but breaks a rule (here: one step too many) is refused."""
    ledger = filled(tmp_path)
    last = ledger.entries()[-1]
    body = {"run": "run", "phase": "private", "attempt": 0, "first_step": 20, "num_steps": 1}
    extra = dataclasses.replace(
        last, index=last.index + 1, previous=last.digest, kind="charge", body=body
    )
    entry_path(tmp_path, extra.index).write_bytes(extra.to_bytes())
    with pytest.raises(LedgerError, match="entry 5 breaks the rules"):
        Ledger(str(tmp_path), "photos").verify()


def test_cut_tail_is_found_by_a_head_kept_elsewhere(tmp_path: Path) -> None:
    ledger = filled(tmp_path)
    head = ledger.head()
    early = LedgerHead(index=1, digest=ledger.entries()[1].digest)
    entry_path(tmp_path, head.index).unlink()
    cut = Ledger(str(tmp_path), "photos")
    cut.verify(head=early)
    with pytest.raises(LedgerError, match="tail was cut off"):
        cut.verify(head=head)
    with pytest.raises(LedgerError, match="lost entries while in use"):
        ledger.spent()
    with pytest.raises(LedgerError, match="tail was cut off"):
        cut.verify(head=LedgerHead(index=1, digest=DIGEST))


def test_entries_of_another_domain_are_refused(tmp_path: Path) -> None:
    filled(tmp_path)
    shutil.copytree(tmp_path / "photos", tmp_path / "scans")
    with pytest.raises(LedgerError, match="domain photos"):
        Ledger(str(tmp_path), "scans").verify()


def test_unknown_weights_are_refused(ledger: Ledger) -> None:
    attempt = start(ledger)
    attempt.charge(0, 1)
    attempt.record_weights(1, DIGEST, "checkpoint")
    ledger.verify(weights_digest=DIGEST)
    ledger.require_weights(DIGEST, run="run", phase="private", step=1)
    with pytest.raises(LedgerError, match="names weights"):
        ledger.verify(weights_digest="cd" * 32)


# Storage


@pytest.mark.parametrize("domain", ["", "a/b", "../up", "Photos", "a" * 64, ".hidden", "a b"])
def test_bad_domains_are_refused(tmp_path: Path, domain: str) -> None:
    with pytest.raises(LedgerError, match="domain is"):
        Ledger(str(tmp_path), domain)


def test_storage_without_conditional_create_is_refused_by_name() -> None:
    with pytest.raises(LedgerStorageError, match="scheme hdfs"):
        open_home("hdfs://cluster/ledgers", "photos")
    with pytest.raises(LedgerStorageError, match="options that are not known here: colour"):
        open_home("s3://bucket/ledgers?colour=red", "photos")


class OverwritingStore:
    """A store that ignores the condition of a put, as some S3 servers do."""

    def __init__(self) -> None:
        self.store = MemoryStore()

    def put(self, path: str, content: bytes, **_options: object) -> None:
        self.store.put(path, content)

    def __getattr__(self, name: str) -> object:
        return getattr(self.store, name)


def test_overwriting_store_is_refused() -> None:
    ledger = Ledger(ObjectHome(OverwritingStore(), "photos"), "photos")
    with pytest.raises(LedgerStorageError, match="overwrites where it should create"):
        ledger.require_writable()
    with pytest.raises(LedgerStorageError, match="overwrites where it should create"):
        start(ledger)
    assert ledger.entries() == []


def test_require_writable_leaves_nothing(ledger: Ledger, tmp_path: Path) -> None:
    ledger.require_writable()
    assert ledger.entries() == []
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


@pytest.mark.parametrize("failing", ["open", "write", "fsync", "link"])
def test_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str) -> None:
    ledger = Ledger(str(tmp_path), "photos")
    attempt = start(ledger)
    attempt.charge(0, 5)

    def no_space(*_arguments: object, **_options: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, failing, no_space)
        with pytest.raises(
            LedgerStorageError, match="No space left on device; nothing was charged"
        ):
            attempt.charge(5, 5)
    assert ledger.spent() == [(MECHANISM, 5)]
    assert not list((tmp_path / "photos").glob(".*.tmp"))
    attempt.charge(5, 5)


def test_file_system_without_hard_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def not_supported(*_arguments: object) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", not_supported)
    with pytest.raises(LedgerStorageError, match="may lack hard links"):
        start(Ledger(str(tmp_path), "photos"))


def test_unwritable_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(LedgerStorageError, match="ledger in"):
        start(Ledger(str(tmp_path / "file"), "photos"))


def test_repeated_link_that_meets_itself_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over NFS the answer to a link may be lost: the client repeats it and is told 'exists'."""
    link = os.link

    def link_twice(source: Path, target: Path) -> None:
        link(source, target)
        link(source, target)

    ledger = Ledger(str(tmp_path), "photos")
    attempt = start(ledger)
    monkeypatch.setattr(os, "link", link_twice)
    attempt.charge(0, 5)
    assert ledger.spent() == [(MECHANISM, 5)]
    assert len(ledger.entries()) == 2


def test_listing_taken_while_others_write_is_repeated(tmp_path: Path) -> None:
    class Hasty:
        """Shows entry n + 1 without entry n once, as a folder read during writes may."""

        def __init__(self) -> None:
            self.home = open_home(str(tmp_path), "photos")
            self.hides = [1]

        def indices(self) -> list[int]:
            hidden = self.hides.pop() if self.hides else -1
            return [index for index in self.home.indices() if index != hidden]

        def __getattr__(self, name: str) -> object:
            return getattr(self.home, name)

    filled(tmp_path)
    assert len(Ledger(Hasty(), "photos").entries()) == 5


def test_foreign_files_are_ignored(tmp_path: Path) -> None:
    ledger = filled(tmp_path)
    for name in (".00000009.json.abc.tmp", "notes.txt", "1.json"):
        (tmp_path / "photos" / name).write_text("x")
    assert ledger.verify().num_entries == 5


def test_entries_are_readable_json(tmp_path: Path) -> None:
    filled(tmp_path)
    record = json.loads(entry_path(tmp_path, 1).read_text())
    assert record["kind"] == "charge" and record["body"]["num_steps"] == 10
    assert set(record) == {
        "body",
        "digest",
        "domain",
        "index",
        "kind",
        "previous",
        "version",
        "written_at",
    }


def test_public_face() -> None:
    assert set(ledger_module.__all__) >= {"Ledger", "Attempt", "LedgerError", "ReserveExhausted"}


# A real object store


@pytest.fixture
def s3_uri(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    server = shutil.which("moto_server")
    if server is None:
        pytest.skip("needs moto_server: pip install 'moto[server]'")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    process = subprocess.Popen(
        [server, "-H", "127.0.0.1", "-p", str(port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        for _ in range(100):
            try:
                put_bucket = Request(f"http://127.0.0.1:{port}/ledgers", method="PUT")
                urlopen(put_bucket, timeout=5).read()
                break
            except OSError:
                time.sleep(0.1)
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "testing")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "testing")
        monkeypatch.setenv("AWS_REGION", "us-east-1")
        yield f"s3://ledgers/below?endpoint_override=127.0.0.1:{port}&scheme=http"
    finally:
        process.terminate()
        process.wait()


@pytest.mark.slow
def test_object_store_with_create_if_absent(s3_uri: str) -> None:
    first, second = Ledger(s3_uri, "photos"), Ledger(s3_uri, "photos")
    attempt = start(first, "a")
    attempt.charge(0, 5)
    start(second, "b").charge(0, 4)
    attempt.charge(5, 5)
    newer = start(second, "a", first_step=10)
    with pytest.raises(FencedError):
        attempt.charge(10, 1)
    newer.charge(10, 1)
    assert first.spent() == [(MECHANISM, 15)]
    assert second.verify(head=first.head()).num_entries == 7
    home = open_home(s3_uri, "photos")
    assert not home.create(3, b"another's")
    assert home.indices() == list(range(7))
