"""DatasetManifest: what a prepared dataset is, who may see it, and digests of all its bytes.

The manifest is written last: a folder without one is not a dataset. It holds no time stamp, host
name or random value, so that preparing the same source twice gives the same digest.
"""

from __future__ import annotations

import hashlib
import json
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic.dataclasses import dataclass

from pipeline.storage import Location

MANIFEST_NAME = "manifest.json"
SPLIT_NAME = "split.json"

Sha256Hex = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


@dataclass(config=ConfigDict(strict=True, extra="forbid"), frozen=True, slots=True, kw_only=True)
class Shard:
    """One tar of the dataset: its name below the dataset's folder, size and SHA-256.

    Slots, for a large dataset has 100,000 of them, in every process that reads it.
    """

    name: str
    num_bytes: int = Field(ge=0)
    sha256: Sha256Hex


class DatasetManifest(BaseModel):
    """The identity of one prepared dataset; the unit of trust between prepare and training.

    `visibility` decides everything later: only a public manifest can give a public gradient, be
    scored in a report, or be used by a run without a guarantee. A private manifest names the
    privacy domain whose ledger pays for every use.

    Guarantees:
        1. The same content gives the same digest (test_manifest: no time stamps, key order).
        2. A private manifest without a domain cannot be made.
        3. An unknown key is an error.
    """

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid")

    format_version: Literal[1] = 1
    name: str = Field(min_length=1)
    num_records: int = Field(ge=0)
    visibility: Literal["public", "private"]
    domain: str | None = None
    ledger_home: str | None = None
    origin: str = ""
    image_short_side: int = Field(gt=0)
    source: str
    class_names: tuple[str, ...] | None = Field(default=None, strict=False)
    channels: Literal[3] = 3
    shards: tuple[Shard, ...] = Field(default=(), strict=False)
    index_digest: Sha256Hex
    sources_digest: Sha256Hex | None = None
    config_digest: Sha256Hex | None = None
    created_with: str
    group_key: str | None = None
    max_records_per_group: int | None = None
    """Where the privacy unit is a group: what its records share, and the most of them."""

    @model_validator(mode="after")
    def _check_domain(self) -> DatasetManifest:
        if self.visibility == "private" and not self.domain:
            raise ValueError(
                "domain is missing: a private dataset needs the name of the privacy domain whose"
                " ledger pays for its use; give `domain`, or set visibility to public"
            )
        if self.visibility == "public" and (self.domain or self.ledger_home):
            raise ValueError(
                f"domain={self.domain!r} and ledger_home={self.ledger_home!r} belong to private"
                " datasets only; leave them out, or set visibility to private"
            )
        return self

    @property
    def privacy_unit(self) -> str:
        """As a Mechanism names it: "record", or "group_of_k" for groups of at most k."""
        num = self.max_records_per_group
        return "record" if num is None or num == 1 else f"group_of_{num}"

    @property
    def is_private(self) -> bool:
        """Whether every use of these images must be paid for in a ledger."""
        return self.visibility == "private"

    def canonical_json(self) -> str:
        """The manifest as sorted, compact JSON: what `digest` hashes."""
        return json.dumps(self._content(), sort_keys=True, separators=(",", ":"))

    def _content(self) -> dict[str, Any]:
        content = self.model_dump(mode="json")
        for name in ("group_key", "max_records_per_group"):
            if content[name] is None:  # as in manifests from before there were groups
                del content[name]
        return content

    def digest(self) -> str:
        """SHA-256 (hex) of the canonical JSON: the name of exactly these images and labels."""
        return hashlib.sha256(self.canonical_json().encode()).hexdigest()

    def save(self, root: Location) -> None:
        """Write `manifest.json` into the dataset's folder; call it after everything else."""
        text = json.dumps(self._content(), sort_keys=True, indent=1)
        (root / MANIFEST_NAME).write_text(text + "\n")

    @classmethod
    def load(cls, root: Location) -> DatasetManifest:
        """Read the manifest of a dataset's folder.

        Raises:
            ValueError: there is no manifest (never finished, or not a dataset), or it is damaged.
        """
        try:
            text = (root / MANIFEST_NAME).read_text()
        except FileNotFoundError:
            raise ValueError(
                f"{root} is not a prepared dataset: it has no {MANIFEST_NAME} (a manifest is"
                " written last, so an interrupted prepare has none); run prepare on it"
            ) from None
        try:
            return cls.model_validate_json(text)
        except ValidationError as error:
            problems = "; ".join(
                f"{'.'.join(map(str, e['loc'])) or 'manifest'}: {e['msg']}" for e in error.errors()
            )
            raise ValueError(
                f"{root / MANIFEST_NAME} is damaged or of another version: {problems};"
                " delete that folder, and the same command prepares the dataset again"
            ) from None

    @classmethod
    def exists(cls, root: Location) -> bool:
        """Whether the folder holds a finished dataset."""
        return (root / MANIFEST_NAME).exists()


def mark_split(root: Location, preparation: str, split: str) -> None:
    """Write beside a split's manifest of which preparation it is a part.

    Not in the manifest, which is the same whenever the same pictures are prepared: only the splits
    of one preparation are known to share no record.

    Args:
        preparation: 32 random hex digits, the same for all splits that were made together.
    """
    text = json.dumps({"preparation": preparation, "split": split})
    (root / SPLIT_NAME).write_text(text + "\n")


def split_part(root: Location) -> str:
    """`PREPARATION/SPLIT` of a prepared split, empty for a whole dataset.

    Raises:
        ValueError: the mark is damaged.
    """
    place = root / SPLIT_NAME
    if not place.exists():
        return ""
    try:
        mark = json.loads(place.read_text())
        return f"{mark['preparation']}/{mark['split']}"
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{place} is damaged ({error}): delete it, and what is spent on this split and on the"
            " others adds up"
        ) from None
