"""No kill -9 and no second writer makes the ledger lose a charge (PITFALLS 5, 25)."""

import multiprocessing
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline.privacy.keys import AttemptKey
from pipeline.privacy.ledger import Attempt, FencedError, Ledger, LedgerError, ReserveExhausted
from pipeline.privacy.mechanism import Mechanism

MECHANISM = Mechanism(
    num_records=1_000,
    expected_batch_size=10,
    sampling_probability=0.01,
    noise_multiplier=1.0,
    max_grad_norm=1.0,
    num_steps=8,
    reserve_steps=60,
    delta=1e-5,
)
INTERVAL = 4
SYSTEM_CALLS = ("open", "write", "fsync", "link", "unlink", "mkdir")


def start(ledger: Ledger, run: str, first_step: int) -> Attempt:
    return ledger.open_attempt(
        run=run,
        phase="private",
        mechanism=MECHANISM,
        key_commitment=AttemptKey.from_os_entropy().commitment(),
        first_step=first_step,
    )


def train(home: Path, executed: Path, checkpoint: Path, run: str = "run") -> None:
    """A phase in small: charge, run steps, keep a checkpoint; resumes from the checkpoint."""
    ledger = Ledger(str(home), "photos")
    step = int(checkpoint.read_text()) if checkpoint.exists() else 0
    attempt = start(ledger, run, step)
    while step < MECHANISM.num_steps:
        attempt.charge(step, INTERVAL)
        with executed.open("a") as log:
            for _ in range(INTERVAL):
                log.write(f"{attempt.number}:{step}\n")
                log.flush()
                step += 1
        attempt.record_weights(step, f"{attempt.number:032x}{step:032x}", "checkpoint")
        draft = checkpoint.with_suffix(".draft")
        draft.write_text(str(step))
        draft.replace(checkpoint)
    attempt.finish("complete", step)


def run_in_child(work: Callable[[], None]) -> int:
    """Runs `work` in a forked child; returns its exit code, negative for a signal."""
    child = os.fork()
    if child == 0:
        try:
            work()
            os._exit(0)
        except BaseException:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def kill_at_system_call(number: int) -> None:
    """Arms this process to kill itself at a storage call; even numbers before it, odd after."""
    num_calls = 0
    target, is_after = divmod(number, 2)
    for name in SYSTEM_CALLS:
        original = getattr(os, name)

        def counted(*args: object, _original: Callable = original, **options: object) -> object:
            nonlocal num_calls
            is_target = num_calls == target
            num_calls += 1
            if is_target and not is_after:
                os.kill(os.getpid(), signal.SIGKILL)
            try:
                return _original(*args, **options)
            finally:
                if is_target:
                    os.kill(os.getpid(), signal.SIGKILL)

        setattr(os, name, counted)


def check_sound(home: Path, executed: Path) -> None:
    """Every executed step lies in a charged range of its own attempt, and all is in order."""
    ledger = Ledger(str(home), "photos")
    charged = {
        (entry.body["attempt"], step)
        for entry in ledger.entries()
        if entry.kind == "charge"
        for step in range(
            entry.body["first_step"], entry.body["first_step"] + entry.body["num_steps"]
        )
    }
    lines = executed.read_text().splitlines() if executed.exists() else []
    done = [tuple(int(part) for part in line.split(":")) for line in lines]
    assert len(set(done)) == len(done)
    assert set(done) <= charged
    assert len(done) <= sum(steps for _, steps in ledger.spent())


def test_kill_at_every_system_call(tmp_path: Path) -> None:
    """A run killed before and after each of its storage calls in turn, then resumed."""
    number, killed, most_lost = 0, True, 0
    while killed:
        folder = tmp_path / str(number)
        home, executed, checkpoint = folder / "home", folder / "executed", folder / "step"
        folder.mkdir()

        def killed_run(number: int = number, folder: Path = folder) -> None:
            kill_at_system_call(number)
            train(folder / "home", folder / "executed", folder / "step")

        code = run_in_child(killed_run)
        killed = code == -signal.SIGKILL
        assert killed or code == 0
        check_sound(home, executed)
        train(home, executed, checkpoint)
        check_sound(home, executed)
        (account,) = Ledger(str(home), "photos").accounts()
        assert account.finished == "complete"
        lost = account.num_charged_steps - MECHANISM.num_steps
        assert 0 <= lost <= 2 * INTERVAL + (0 if killed else MECHANISM.num_steps)
        number += 1
        most_lost = max(most_lost, lost)
    assert number > 60, "the sweep did not reach the storage calls"
    assert most_lost == INTERVAL, (
        "no kill cost anything: the sweep missed the window after a charge"
    )


def test_repeated_kills_until_the_reserve_is_used_up(tmp_path: Path) -> None:
    home, executed, checkpoint = tmp_path / "home", tmp_path / "executed", tmp_path / "step"
    ended = None
    for _ in range(200):

        def killed_run() -> None:
            ledger = Ledger(str(home), "photos")
            start(ledger, "run", 0).charge(0, INTERVAL)
            os.kill(os.getpid(), signal.SIGKILL)

        if run_in_child(killed_run) != -signal.SIGKILL:
            break
    ledger = Ledger(str(home), "photos")
    assert sum(steps for _, steps in ledger.spent()) == MECHANISM.max_charged_steps
    try:
        train(home, executed, checkpoint)
    except ReserveExhausted as error:
        ended = error
    assert ended is not None
    assert not executed.exists()


def append_many(home: str, run: str, rounds: int) -> None:
    ledger = Ledger(home, "photos")
    for _ in range(rounds):
        attempt = start(ledger, run, 0)
        for step in range(3):
            attempt.charge(step, 1)


def fight(home: str, rounds: int, charges: "multiprocessing.Queue[int]") -> None:
    """Attempts at one and the same phase against a rival; counts its own successful charges."""
    ledger = Ledger(home, "photos")
    num_charges = 0
    for _ in range(rounds):
        attempt = start(ledger, "same", 0)
        try:
            for step in range(3):
                attempt.charge(step, 1)
                num_charges += 1
        except FencedError:
            continue
    charges.put(num_charges)


def join(processes: list) -> None:
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
        assert process.exitcode == 0


def test_two_writers_at_once(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    home, rounds = str(tmp_path), 12
    join([context.Process(target=append_many, args=(home, run, rounds)) for run in "abc"])
    report = Ledger(home, "photos").verify()
    assert report.num_entries == 3 * rounds * 4
    assert [account.num_charged_steps for account in report.phases] == [3 * rounds] * 3


def test_two_attempts_at_one_phase_fence_each_other(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    home, rounds = str(tmp_path), 10
    charges = context.Queue()
    join([context.Process(target=fight, args=(home, rounds, charges)) for _ in range(2)])
    report = Ledger(home, "photos").verify()
    (account,) = report.phases
    assert len(account.attempts) == 2 * rounds
    assert account.num_charged_steps == charges.get(timeout=5) + charges.get(timeout=5)


def test_no_step_runs_uncharged(tmp_path: Path) -> None:
    """Undisturbed, what is charged is exactly what is executed."""
    train(tmp_path / "home", tmp_path / "executed", tmp_path / "step")
    check_sound(tmp_path / "home", tmp_path / "executed")
    assert Ledger(str(tmp_path / "home"), "photos").spent() == [(MECHANISM, 8)]
    assert len((tmp_path / "executed").read_text().splitlines()) == 8
    ledger = Ledger(str(tmp_path / "home"), "photos")
    with pytest.raises(LedgerError):
        start(ledger, "run", 8).charge(8, 1)
