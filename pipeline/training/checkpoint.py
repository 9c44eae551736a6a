"""Checkpoints: weights, optimizer, step and ledger head as one atomic unit.

    {phase folder}/checkpoint-{step:08d}/model.safetensors  optimizer.safetensors  checkpoint.json

`checkpoint.json` is written last and holds the digests of the others: a folder without it does not
exist. Nothing is ever unpickled. Only public facts are stored: no key, sample, loss or norm.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from safetensors.torch import load, save
from torch import Tensor

from pipeline.storage import Location

_MODEL, _OPTIMIZER, _MANIFEST = "model.safetensors", "optimizer.safetensors", "checkpoint.json"


_REMEDY = (
    "restore it from a copy, or delete this checkpoint folder: the phase then resumes from the one "
    "before it, and pays for the lost steps again"
)


class CheckpointError(ValueError):
    """A checkpoint that is damaged or belongs to something else."""


@dataclass(frozen=True, kw_only=True)
class CheckpointFacts:
    """What a checkpoint says about itself; all of it public.

    Args:
        step: logical steps done.
        finished: why the phase ended here ("complete", "reserve_used_up"), or None if it goes on.
        recipe_digest: of the recipe that trains it.
        mechanism_digest: of the promise it was trained under; None for a public phase.
        ledger_head: (index, digest) of the ledger when it was written; None for a public phase.
        attempt: number of the attempt that wrote it.
        history: public metrics so far (training/metrics.py).
        model: the model section of the recipe.
        origin: digests of the checkpoints it descends from.
        lineage: the private phases that shaped the weights, {domain, run, phase, num_steps} each.
        guarantee: "differential privacy", "none needed (public data)", or "NOT PRIVATE".
    """

    step: int
    finished: str | None
    recipe_digest: str
    mechanism_digest: str | None
    ledger_head: tuple[int, str] | None
    attempt: int
    history: list[dict[str, Any]]
    model: dict[str, Any]
    origin: list[str]
    lineage: list[dict[str, Any]]
    guarantee: str


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A loaded checkpoint whose digests were right."""

    location: Location
    facts: CheckpointFacts
    weights_digest: str
    weights: dict[str, Tensor]
    optimizer: dict[str, Tensor]


def digest_of(content: bytes) -> str:
    """SHA-256 in hex."""
    return hashlib.sha256(content).hexdigest()


def save_checkpoint(
    phase_folder: Location,
    weights: Mapping[str, Tensor],
    optimizer: Mapping[str, Tensor],
    make_facts: Callable[[str], CheckpointFacts],
) -> str:
    """Write a checkpoint and return the digest of its weights.

    Args:
        make_facts: called with the weights' digest once the tensors are durable, so that a ledger
            can name the weights before the checkpoint exists.
    """
    model_bytes, optimizer_bytes = _pack(weights), _pack(optimizer)
    weights_digest = digest_of(model_bytes)
    facts = make_facts(weights_digest)
    folder = phase_folder / f"checkpoint-{facts.step:08d}"
    (folder / _MANIFEST).delete()
    (folder / _MODEL).write_bytes(model_bytes)
    (folder / _OPTIMIZER).write_bytes(optimizer_bytes)
    files = {_MODEL: weights_digest, _OPTIMIZER: digest_of(optimizer_bytes)}
    manifest = {"files": files, "facts": asdict(facts)}
    (folder / _MANIFEST).write_text(json.dumps(manifest, indent=1))
    return weights_digest


def all_checkpoints(phase_folder: Location) -> list[Location]:
    """The finished checkpoints of a phase, by step."""
    folders = [f for f in phase_folder.list() if f.name.startswith("checkpoint-")]
    return [folder for folder in folders if (folder / _MANIFEST).exists()]


def latest_checkpoint(phase_folder: Location) -> Location | None:
    """The finished checkpoint of the highest step, or None."""
    return next(reversed(all_checkpoints(phase_folder)), None)


def read_facts(location: Location) -> CheckpointFacts:
    """What a checkpoint says about itself, without its tensors. Raises CheckpointError."""
    return _parse(location)[1]


def read_claim(location: Location) -> tuple[CheckpointFacts, str]:
    """As `read_facts`, and the digest that it gives of its weights, which is not checked here."""
    files, facts = _parse(location)
    return facts, files[_MODEL]


def load_checkpoint(location: Location) -> Checkpoint:
    """Load and check a checkpoint. Raises CheckpointError if a byte differs from its digest."""
    files, facts = _parse(location)
    contents = {}
    for name, digest in files.items():
        try:
            contents[name] = (location / name).read_bytes()
        except FileNotFoundError:
            raise CheckpointError(f"{location / name}: is missing; {_REMEDY}") from None
        if digest_of(contents[name]) != digest:
            raise CheckpointError(
                f"{location / name}: differs from the digest in {_MANIFEST}; the file was altered "
                f"or damaged: {_REMEDY}"
            )
    return Checkpoint(
        location=location,
        facts=facts,
        weights_digest=files[_MODEL],
        weights=load(contents[_MODEL]),
        optimizer=load(contents[_OPTIMIZER]) if contents[_OPTIMIZER] else {},
    )


def prune(phase_folder: Location, keep: int = 2) -> None:
    """Delete all but the newest `keep` checkpoints; each manifest first, so no half one is left."""
    folders = [f for f in phase_folder.list() if f.name.startswith("checkpoint-")]
    for folder in folders[:-keep]:
        (folder / _MANIFEST).delete()
        folder.delete()


def _pack(tensors: Mapping[str, Tensor]) -> bytes:
    return save({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()})


def _parse(location: Location) -> tuple[dict[str, str], CheckpointFacts]:
    try:
        manifest = json.loads((location / _MANIFEST).read_text())
        facts = dict(manifest["facts"])
        if facts["ledger_head"] is not None:
            index, digest = facts["ledger_head"]
            facts["ledger_head"] = (int(index), str(digest))
        files = {name: str(manifest["files"][name]) for name in (_MODEL, _OPTIMIZER)}
        return files, CheckpointFacts(**facts)
    except FileNotFoundError:
        raise CheckpointError(f"{location}: there is no finished checkpoint here") from None
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{location / _MANIFEST}: is damaged ({error!r}); {_REMEDY}"
        ) from None
