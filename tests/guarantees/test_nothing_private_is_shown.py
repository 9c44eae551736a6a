"""PITFALLS 20 and 31: losses, norms and counts of a private phase reach the private log only."""

from __future__ import annotations

import json
import stat
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest
from phase_fixtures import run

from pipeline.privacy.keys import AttemptKey
from pipeline.training import phase
from pipeline.training.metrics import PublicMetrics
from pipeline.training.settings import PhaseSettings

Make = Callable[..., PhaseSettings]


def private_numbers(log: Path) -> set[str]:
    """Every number of the private log, as it would be written elsewhere."""
    found = set()
    for line in log.read_text().splitlines():
        for name, value in json.loads(line).items():
            if name in ("loss", "clipped_fraction", "seconds"):
                found.add(repr(value))
            if name == "norm_quartiles":
                found |= {repr(v) for v in value}
    return {text for text in found if len(text) > 6}


def test_nothing_private_is_shown(
    settings: Make, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    made = settings("private")
    _, shown = run(made)
    console = "".join(capfd.readouterr())
    (log,) = (tmp_path / "private-logs").iterdir()
    numbers = private_numbers(log)
    assert len(numbers) > 10
    images = tmp_path / "private-set"
    everything = [p for p in tmp_path.rglob("*") if p.is_file() and p != log]
    written = [p for p in everything if images not in p.parents]
    assert any(path.name == "checkpoint.json" for path in written)
    for path in written:
        text = path.read_bytes().decode("latin-1")
        assert not [n for n in numbers if n in text], path
    assert not [n for n in numbers if n in console + repr(shown)]
    assert all(
        metrics.train_loss is None and metrics.images_per_second is None for metrics in shown
    )


def test_what_is_shown_is_a_closed_list() -> None:
    """A new field is a new release: think, then change this test."""
    assert set(PublicMetrics.__dataclass_fields__) == {
        "step",
        "learning_rate",
        "epsilon",
        "images_per_second",
        "held_out_loss",
        "train_loss",
    }


def test_private_log_is_for_its_owner(settings: Make, tmp_path: Path) -> None:
    run(settings("private"))
    folder = tmp_path / "private-logs"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert [stat.S_IMODE(p.stat().st_mode) for p in folder.iterdir()] == [0o600]


def test_no_key_is_written(settings: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """PITFALLS 4: neither the attempt's secret nor a sub-key reaches any file."""
    keys: list[AttemptKey] = []
    original = AttemptKey.from_os_entropy.__func__  # type: ignore[attr-defined]

    def remember(cls: type[AttemptKey]) -> AttemptKey:
        keys.append(original(cls))
        return keys[-1]

    monkeypatch.setattr(AttemptKey, "from_os_entropy", classmethod(remember))
    run(settings("private"))
    (key,) = keys
    secrets = [key.secret, key.sampling_key(), key.augmentation_key(), key.noise_key()]
    for path in (p for p in tmp_path.rglob("*") if p.is_file()):
        content = path.read_bytes()
        for secret in secrets:
            assert secret not in content and secret.hex().encode() not in content, path


@pytest.mark.parametrize("kind", [ValueError, IndexError, RuntimeError, OSError])
def test_a_librarys_words_go_to_the_private_log(
    settings: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: type[Exception]
) -> None:
    """What numpy, torch or the system say of a failure may hold a count or a name."""

    def fail(*_arguments: object, **_options: object) -> None:
        raise kind("index 20417 is out of bounds, uncle-fred.jpg")

    monkeypatch.setattr(phase, "normalise_images", fail)
    with pytest.raises((ValueError, RuntimeError), match="private log only") as caught:
        run(settings("private"))
    shown = "".join(traceback.format_exception(caught.value))
    assert "20417" not in shown and "fred" not in shown and kind.__name__ in shown
    assert isinstance(caught.value, ValueError) == issubclass(kind, ValueError)
    (log,) = (tmp_path / "private-logs").iterdir()
    assert "uncle-fred.jpg" in log.read_text()
    with pytest.raises(kind, match="uncle-fred"):
        run(settings("public"))
