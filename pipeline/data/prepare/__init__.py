"""Prepare: any source -> checked, de-duplicated, resized shards with an index and a manifest.

Decides once, before any training, which records exist. Three passes:

1. parts.py: every source unit is read, decoded, digested, resized and written as a *part*
   (parallel; a finished part is kept when the job is run again);
2. selection.py: the digests of all parts decide which records stay, and in which split
   (questions.py what is asked of them together, exchange.py how they meet, in parallel);
3. writing.py: parts are copied into numbered shards (parallel), then the index is written.

All three run on a thread pool or as Ray Data tasks (executors.py): the same bytes either way.
"""

from __future__ import annotations

import functools
import os
import uuid
from collections.abc import Callable, Sequence
from typing import Literal

from pipeline.data.manifest import DatasetManifest, mark_split
from pipeline.data.prepare.config import PrepareConfig, PrepareProgress, Progress
from pipeline.data.prepare.executors import Run, run_with_ray, run_with_threads
from pipeline.data.prepare.isolation import close_idle_converters
from pipeline.data.prepare.parts import PARTS, Part, ReadUnit
from pipeline.data.prepare.selection import (
    SUMMARY_NAME,
    other_sets,
    read_summary,
    select,
)
from pipeline.data.prepare.writing import write_dataset
from pipeline.data.shards import StorageFault
from pipeline.data.sources import SourceUnit, open_source
from pipeline.storage import Location, system_reason

__all__ = [
    "PrepareConfig",
    "PrepareProgress",
    "Progress",
    "close_idle_converters",
    "has_source_changed",
    "prepare",
    "read_summary",
]


def prepare(
    config: PrepareConfig,
    destination: Location,
    progress: Progress | None = None,
    *,
    executor: Literal["threads", "ray"] = "threads",
    num_workers: int | None = None,
) -> dict[str, DatasetManifest]:
    """Make the dataset that a config describes; return at once if it is already there.

    Args:
        config: what to prepare.
        destination: its folder; with splits, the folder that holds one folder per split.
        progress: called after each unit.
        executor: "threads" in this process, or "ray" for Ray Data tasks (needs an initialised
            Ray). The output bytes are the same.
        num_workers: number of threads, None = one per CPU; of Ray, the most CPUs that its tasks
            may hold, None = all that are free.

    Returns:
        The manifests, by split name; by "" where there are no splits.

    Raises:
        ValueError: the source is empty or missing; another dataset lies at the destination; a
            public dataset would be cleaned by looking at a private one; an original file belongs
            to another privacy domain; nothing is left.
        StorageFault: storage cannot be read or written.

    Guarantees:
        1. Content never stops it, not even what crashes a decoder: every record left out is counted
           by reason (test_undecodable_records, test_decoder_crashes). The processes that decode
           wait for the next call until this process ends, or `close_idle_converters`.
        2. A public dataset is the same whatever private sets exist (test_overlap).
        3. Interrupted and run again, or with another executor or number of workers, it gives the
           same bytes (test_prepare, test_prepare_ray).
    """
    if executor not in ("threads", "ray"):
        raise ValueError(f"executor={executor!r} must be threads or ray")
    roots = {name: destination / name for name in config.splits or {}} or {"": destination}
    finished = {
        name: _existing(config, root)
        for name, root in roots.items()
        if DatasetManifest.exists(root)
    }
    if len(finished) == len(roots):
        return finished
    others = other_sets(config)
    source = open_source(config.source, config.where, config.group_key)
    units = source.list_units()
    run: Run = functools.partial(run_with_ray, num_cpus=num_workers)
    if executor == "threads":
        num_threads = num_workers or os.cpu_count() or 1
        run = functools.partial(run_with_threads, num_threads=num_threads)
    try:
        parts = _read_all(ReadUnit(config, destination / PARTS, source), units, run, progress)
        summary = select(
            config,
            destination,
            parts,
            splits=list(roots),
            others=others,
            listing_digest=source.listing_digest(),
            run=run,
            progress=_choosing(parts, progress),
        )
        empty = [name or config.name for name, num in summary.num_records.items() if not num]
        if empty:
            raise ValueError(
                f"source={config.source}: no record is left for {', '.join(empty)};"
                f" {destination / SUMMARY_NAME} says what was left out and why: check the source"
            )
        manifests = {
            name: write_dataset(
                config,
                source,
                parts,
                folder=destination / PARTS,
                root=root,
                split=split,
                summary=summary,
                run=run,
                progress=progress,
            )
            for split, (name, root) in enumerate(roots.items())
        }
        if config.splits and config.visibility == "private":
            preparation = uuid.uuid4().hex
            for name, root in roots.items():
                mark_split(root, preparation, name)
        # Manifests last, all together: until then none of the datasets exists.
        for name, manifest in manifests.items():
            manifest.save(roots[name])
        (destination / PARTS).delete()
    except (OSError, StorageFault) as error:
        if all(DatasetManifest.exists(root) for root in roots.values()):
            # Another process prepared the same and cleared the working files under this one.
            return {name: _existing(config, root) for name, root in roots.items()}
        if isinstance(error, StorageFault):
            raise
        raise StorageFault(
            f"prepare cannot read or write its files at {destination}"
            f" ({system_reason(error)}); check that it may be written and has room",
            str(error),
        ) from None
    return manifests


def has_source_changed(config: PrepareConfig, destination: Location) -> bool:
    """Whether files of a finished dataset's source were added, removed, renamed or resized since.

    The prepared copy stays what it is; a picture withdrawn from the source is still in it. False
    where the source is gone or was prepared by a version that kept no listing.
    """
    try:
        before = read_summary(destination).get("listing_digest")
        return (
            before is not None
            and before
            != open_source(config.source, config.where, config.group_key).listing_digest()
        )
    except (OSError, ValueError):
        return False


def _existing(config: PrepareConfig, root: Location) -> DatasetManifest:
    manifest = DatasetManifest.load(root)
    if manifest.config_digest != config.digest():
        raise ValueError(
            f"{root} already holds dataset {manifest.name!r}, prepared from {manifest.source} by"
            " other settings; choose another destination, or delete that folder"
        )
    return manifest


def _read_all(
    task: ReadUnit, units: Sequence[SourceUnit], run: Run, progress: Progress | None
) -> list[Part]:
    """Pass 1 over all units, reporting each."""
    parts: list[Part] = []
    num_records = num_left_out = 0
    for part in run(task, units):
        parts.append(part)
        num_records += part.num_records
        num_left_out += sum(part.left_out.values())
        if progress is not None:
            progress(
                PrepareProgress(
                    stage="reading",
                    num_done=len(parts),
                    num_units=len(units),
                    num_records=num_records,
                    num_left_out=num_left_out,
                )
            )
    return parts


def _choosing(parts: Sequence[Part], progress: Progress | None) -> Callable[[int, int], None]:
    """Reports pass 2."""

    def tell(num_done: int, num_questions: int) -> None:
        if progress is not None:
            progress(
                PrepareProgress(
                    stage="choosing",
                    num_done=num_done,
                    num_units=num_questions,
                    num_records=sum(part.num_records for part in parts),
                    num_left_out=sum(sum(part.left_out.values()) for part in parts),
                )
            )

    return tell
