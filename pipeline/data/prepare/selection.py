"""Pass 2: from the digests of all parts, which records exist, in which split, with which label."""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from pipeline.data.manifest import DatasetManifest
from pipeline.data.prepare.config import PrepareConfig
from pipeline.data.prepare.exchange import (
    Question,
    Task,
    Verdicts,
    ask,
    plan_tasks,
    tasks_of_others,
)
from pipeline.data.prepare.executors import Run
from pipeline.data.prepare.parts import PARTS, Part, fixed_column, read_part, selection_file
from pipeline.data.prepare.questions import (
    CONFLICT,
    COPY,
    EXCLUDED,
    NEAR,
    OVER_LIMIT,
    REMOVING,
    Copies,
    ForeignOriginals,
    GroupLimit,
    NearCopies,
    flags_of,
)
from pipeline.storage import Location

SUMMARY_NAME = "prepare_summary.json"
REMOVED = -1
_REASONS = [
    (COPY, "duplicate"),
    (EXCLUDED, "also_in_excluded_set"),
    (NEAR, "near_duplicate"),
    (OVER_LIMIT, "over_group_limit"),
]


@dataclass(kw_only=True)
class Summary:
    """What became of the source's records: how many stay, by split, and why others do not.

    multiplicities: how many pictures were found twice, three times, and so on.
    """

    num_records: dict[str, int]
    left_out: Counter[str] = field(default_factory=Counter)
    multiplicities: Counter[int] = field(default_factory=Counter)
    num_label_conflicts: int = 0
    num_labels_dropped: int = 0


def select(
    config: PrepareConfig,
    destination: Location,
    parts: Sequence[Part],
    *,
    splits: Sequence[str],
    others: OtherSets,
    listing_digest: str,
    run: Run,
    progress: Callable[[int, int], None] | None = None,
) -> Summary:
    """Decide each record's fate and write it beside its part: int32 (split or REMOVED, label).

    Args:
        others: what the dataset is compared with.
        run: runs the tasks; the driver holds no record.
        progress: told how many questions are answered, of how many.

    Raises:
        ValueError: an original file already belongs to another privacy domain.
    """
    folder = destination / PARTS
    tasks = plan_tasks(parts)
    questions = _questions(config, folder, others)
    answers: list[Verdicts] = []
    for number, question in enumerate(questions):
        asked = question(tuple(answers))
        verdicts = ask(asked, [*tasks, *_rows_of_others(asked, others, len(tasks))], folder, run)
        if isinstance(asked, ForeignOriginals):
            _refuse_foreign(config, verdicts, tasks, others)
        else:
            answers.append(verdicts)
        if progress is not None:
            progress(number + 1, len(questions) + 1)
    summary = Summary(num_records=dict.fromkeys(splits, 0))
    for part in parts:
        summary.left_out.update(part.left_out)
    for found in run(_Decide(config, folder, tuple(answers)), tasks):
        summary.left_out.update(found.left_out)
        summary.multiplicities.update(found.multiplicities)
        summary.num_label_conflicts += found.num_label_conflicts
        summary.num_labels_dropped += found.num_labels_dropped
        for split, name in enumerate(splits):
            summary.num_records[name] += found.num_kept[split]
    if progress is not None:
        progress(len(questions) + 1, len(questions) + 1)
    summary.left_out = Counter({k: v for k, v in sorted(summary.left_out.items()) if v})
    _write_summary(config, destination, summary, listing_digest)
    return summary


def _questions(
    config: PrepareConfig, folder: Location, others: OtherSets
) -> list[Callable[[tuple[Verdicts, ...]], Question]]:
    """What is asked, in order; each knows the answers before it."""
    questions: list[Callable[[tuple[Verdicts, ...]], Question]] = []
    merges = config.deduplicate != "none"
    if others.domains:
        domains = {root: number for number, root in enumerate(others.domains)}
        questions.append(lambda _: ForeignOriginals(folder=folder, domains=domains))
    if merges or others.excluded:
        questions.append(lambda _: Copies(folder=folder, merges=merges))
    if config.deduplicate == "perceptual":
        questions.append(lambda answers: NearCopies(folder=folder, earlier=answers))
    limit = config.max_records_per_group
    if limit is not None:
        questions.append(
            lambda answers: GroupLimit(
                folder=folder, earlier=answers, limit=limit, salt=config.split_salt
            )
        )
    return questions


@dataclass(frozen=True, kw_only=True)
class OtherSets:
    """Prepared datasets that a new one is compared with.

    Args:
        excluded: folder -> N of those whose pictures are left out.
        domains: folder -> privacy domain of private ones in other domains; `sizes` their N.
    """

    excluded: dict[str, int]
    domains: dict[str, str]
    sizes: dict[str, int]


def other_sets(config: PrepareConfig) -> OtherSets:
    """The datasets that `exclude` and `other_private` name.

    Raises:
        ValueError: a public dataset would be cleaned by a private one, or one domain would hold
            records of different privacy units.
    """
    excluded: dict[str, int] = {}
    for uri in config.exclude:
        manifest = DatasetManifest.load(Location(uri))
        if config.visibility == "public" and manifest.is_private:
            raise ValueError(
                f"exclude={uri} of public dataset {config.name!r} is private: a public set must"
                " not be chosen by looking at a private one; put the public dataset into the"
                " private one's exclude instead"
            )
        excluded[uri] = manifest.num_records
    domains: dict[str, str] = {}
    sizes: dict[str, int] = {}
    for uri in config.other_private if config.visibility == "private" else ():
        manifest = DatasetManifest.load(Location(uri))
        if not manifest.is_private:
            continue
        if manifest.domain != config.domain:
            domains[uri], sizes[uri] = manifest.domain or "", manifest.num_records
            continue
        unit = (config.group_key, config.max_records_per_group)
        before = (manifest.group_key, manifest.max_records_per_group)
        if unit != before:
            raise ValueError(
                f"group_key={unit[0]!r} and max_records_per_group={unit[1]!r} of dataset"
                f" {config.name!r}: its domain {config.domain!r} already holds {uri}, prepared"
                f" with {before[0]!r} and {before[1]!r}; what a domain has paid is paid for one"
                " kind of privacy unit: prepare both with the same"
            )
    return OtherSets(excluded=excluded, domains=domains, sizes=sizes)


def _rows_of_others(question: Question, others: OtherSets, first_index: int) -> list[Task]:
    """The records of other datasets that concern a question, in tasks."""
    if isinstance(question, Copies):
        sizes = others.excluded
    elif isinstance(question, ForeignOriginals):
        sizes = others.sizes
    else:
        return []
    return tasks_of_others(sizes, first_index)


def _refuse_foreign(
    config: PrepareConfig, verdicts: Verdicts, tasks: Sequence[Task], others: OtherSets
) -> None:
    """Raise ValueError if an original file is already paid for by another privacy domain."""
    for task in tasks:
        found = verdicts.of(task)
        if found.num_rows:
            domain = list(others.domains.values())[found.column("num_copies")[0].as_py()]
            raise ValueError(
                f"domain={config.domain!r} of dataset {config.name!r}: some of its original files"
                f" already belong to privacy domain {domain!r}; prepare them under that domain, so"
                " that one ledger pays for both uses"
            )


@dataclass(kw_only=True)
class _Decided:
    """What became of a task's records, counted."""

    num_kept: list[int]
    left_out: Counter[str] = field(default_factory=Counter)
    multiplicities: Counter[int] = field(default_factory=Counter)
    num_label_conflicts: int = 0
    num_labels_dropped: int = 0


@dataclass(frozen=True)
class _Decide:
    """Writes the selection of a task's parts from the answers about them."""

    config: PrepareConfig
    folder: Location
    answers: tuple[Verdicts, ...]

    def __call__(self, task: Task) -> _Decided:
        config = self.config
        shares = list((config.splits or {"": 1.0}).values())
        bounds = np.cumsum(shares)[:-1]
        num_classes = len(config.class_names) if config.class_names is not None else 2**31
        decided = _Decided(num_kept=[0] * len(shares))
        flags_by_unit = flags_of(task, self.answers)
        for part in task.parts:
            table, flags = read_part(self.folder, part.unit), flags_by_unit[part.unit]
            labels = np.array(table.column("label").to_numpy(), np.int32, copy=True)
            # All of a group is in one split, or else one unit would pay in several of them.
            column = "pixel_digest" if config.group_key is None else "group"
            digests = [digest.tobytes() for digest in fixed_column(table, column)]
            fate = np.array([_split_of(d, config.split_salt, bounds) for d in digests], np.int32)
            fate[(flags & REMOVING) > 0] = REMOVED
            stays = fate != REMOVED
            has_conflict, is_outside = (flags & CONFLICT) > 0, labels >= num_classes
            labels[has_conflict | is_outside] = -1
            unexplained = np.ones(len(flags), bool)
            for bit, reason in _REASONS:
                is_it = unexplained & ((flags & bit) > 0)
                decided.left_out[reason] += int(is_it.sum())
                unexplained &= ~is_it
            decided.num_label_conflicts += int((has_conflict & stays).sum())
            decided.num_labels_dropped += int((is_outside & stays).sum())
            for split in range(len(shares)):
                decided.num_kept[split] += int((fate == split).sum())
            content = np.stack([fate, labels]).astype(np.int32).tobytes()
            selection_file(self.folder, part.unit).write_bytes(content)
        for answer in self.answers:
            copies = answer.of(task).column("num_copies").to_numpy()
            decided.multiplicities.update((copies[copies > 0] + 1).tolist())
        return decided


def _split_of(digest: bytes, salt: str, bounds: npt.NDArray[np.float64]) -> int:
    hashed = hashlib.sha256(salt.encode() + b"\0" + digest).digest()
    share = int.from_bytes(hashed[:8], "big") / 2**64
    return int(np.searchsorted(bounds, share, side="right"))


def _write_summary(
    config: PrepareConfig, destination: Location, summary: Summary, listing_digest: str
) -> None:
    """What was left out and why: private if the source is, so readable by its owner only."""
    content = {
        "dataset": config.name,
        "visibility": config.visibility,
        "num_records": {name or config.name: n for name, n in summary.num_records.items()},
        "left_out": dict(summary.left_out),
        "multiplicities": {str(k): v for k, v in sorted(summary.multiplicities.items())},
        "num_label_conflicts": summary.num_label_conflicts,
        "num_labels_dropped": summary.num_labels_dropped,
        "listing_digest": listing_digest,
    }
    text = json.dumps(content, indent=1) + "\n"
    location = destination / SUMMARY_NAME
    if config.visibility == "private" and location.is_local:
        location.local_path.unlink(missing_ok=True)
        descriptor = os.open(location.local_path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with open(descriptor, "w") as stream:
            stream.write(text)
    else:
        location.write_text(text)


def read_summary(destination: Location) -> dict[str, Any]:
    """The operator's summary of a finished prepare: counts by reason. Private if the source is."""
    summary: dict[str, Any] = json.loads((destination / SUMMARY_NAME).read_text())
    return summary


def read_selection(folder: Location, unit: int) -> npt.NDArray[np.int32]:
    """int32 [2, n]: split or REMOVED, and label."""
    return np.frombuffer(selection_file(folder, unit).read_bytes(), np.int32).reshape(2, -1)
