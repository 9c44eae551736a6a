"""PITFALLS 20 and 31: what leaves a private phase is a function of public facts and its release.

Two seeded runs over sets of equal N and nothing else in common, with the clipped sum forced to 0 in
both, leave the same bytes everywhere outside the private log, clocks apart.
"""

from __future__ import annotations

import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from phase_fixtures import make_dataset, run

from pipeline.data.shards import ShardStore
from pipeline.dpsgd.engine import ClippedGradientSum
from pipeline.privacy.ledger import book
from pipeline.training import phase
from pipeline.training.settings import PhaseSettings


@pytest.fixture
def two_sets(tmp_path: Path) -> tuple[Path, Path]:
    """Sets that share N and no picture; marked public, since seeded runs take no other."""
    roots = [Path(make_dataset(tmp_path / name, "public", seed)) for name, seed in TWO]
    first, second = (ShardStore(str(root)) for root in roots)
    assert first.num_records == second.num_records
    digests = [{d.tobytes() for d in store.pixel_digests()} for store in (first, second)]
    assert not digests[0] & digests[1]
    labels = [store.labels(np.arange(store.num_records)) for store in (first, second)]
    assert (labels[0] != labels[1]).any()
    return roots[0], roots[1]


TWO = (("first", 11), ("second", 12))


@pytest.fixture
def stopped_clocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rate shown and the minute in a ledger entry; TensorBoard's own is masked below."""
    monkeypatch.setattr(phase, "two_digits", lambda rate: 1.0)

    class Stopped(book.datetime):
        @classmethod
        def now(cls, tz: Any = None) -> Any:
            return cls(2026, 1, 1, tzinfo=tz)

    monkeypatch.setattr(book, "datetime", Stopped)


@pytest.fixture
def no_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clipped sum is 0 whatever was accumulated; all else runs as ever."""
    original = ClippedGradientSum.accumulate

    def accumulate(self: ClippedGradientSum, *arguments: Any, **options: Any) -> Any:
        seen = original(self, *arguments, **options)
        self.flat_sum.zero_()
        return seen

    monkeypatch.setattr(ClippedGradientSum, "accumulate", accumulate)


def everything_written(place: Path) -> dict[str, bytes]:
    """Bytes by path, of all files but the prepared set and the private log."""
    found = {}
    for path in sorted(place.rglob("*")):
        name = str(path.relative_to(place))
        if path.is_file() and name.split("/", maxsplit=1)[0] not in ("set", "private-logs"):
            content = path.read_bytes()
            if "tfevents" in name:
                name, content = name.split("tfevents", maxsplit=1)[0], without_first_event(content)
            assert name not in found
            found[name] = content
    return found


def without_first_event(content: bytes) -> bytes:
    """A TensorBoard file without its first record, which holds the time it was opened."""
    (length,) = struct.unpack("<Q", content[:8])
    return content[8 + 4 + length + 4 :]


def outcome_of(
    make: Callable[..., PhaseSettings], tmp_path: Path, images: Path, capfd: Any
) -> tuple[dict[str, bytes], str]:
    """Runs a seeded private phase over `images`, always at the same place."""
    place = tmp_path / "place"
    shutil.copytree(images, place / "set")
    made = make(
        "private",
        run="some-run",
        seed=3,
        dataset_root=str(place / "set"),
        domain="public-some",
        ledger_home=str(place / "domains"),
        output=str(place / "phase"),
        private_log=str(place / "private-logs"),
    )
    _, shown = run(made)
    assert list((place / "private-logs").iterdir())
    written, said = everything_written(place), "".join(capfd.readouterr()) + repr(shown)
    shutil.rmtree(place)
    return written, said


@pytest.mark.usefixtures("stopped_clocks", "no_gradient")
def test_private_contents_do_not_interfere(
    settings: Callable[..., PhaseSettings],
    two_sets: tuple[Path, Path],
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    (written, said), (other, other_said) = (
        outcome_of(settings, tmp_path, images, capfd) for images in two_sets
    )
    assert {name.split("/")[0] for name in written} == {"phase", "domains"}
    assert any(name.endswith("model.safetensors") for name in written) and len(written) > 8
    assert written.keys() == other.keys()
    assert not [name for name, content in written.items() if content != other[name]]
    assert said == other_said


@pytest.mark.usefixtures("stopped_clocks")
def test_the_comparison_can_fail(
    settings: Callable[..., PhaseSettings],
    two_sets: tuple[Path, Path],
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """With the gradients left in, the weights differ: the test above has something to see."""
    (written, _), (other, _) = (
        outcome_of(settings, tmp_path, images, capfd) for images in two_sets
    )
    differing = {name for name, content in written.items() if content != other[name]}
    assert any(name.endswith("model.safetensors") for name in differing)
