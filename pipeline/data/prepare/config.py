"""PrepareConfig: what to prepare and by which rules."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Literal

from pipeline.data.prepare.conversion import ConversionRules


@dataclass(frozen=True, kw_only=True)
class PrepareConfig:
    """What to prepare and by which rules; all of it is public.

    Args:
        name: the dataset's name in recipes and reports.
        source: a source URI, see `sources.open_source`.
        visibility: whether the images may be shown and scored freely.
        domain, ledger_home: of a private dataset, the privacy domain that pays and where its
            ledger lives.
        origin: where the images come from, for the statement.
        image_short_side: longer images are shrunk to this short side; smaller ones stay.
        jpeg_quality: of the stored images.
        deduplicate: "exact" merges records with equal decoded pixels. The first in source order
            survives; it loses its label if a copy carries another one. "perceptual" also removes
            records that look like an earlier one (`questions.NearCopies`), whose label stays.
        exclude: folders of prepared datasets whose pictures are removed from this one.
        other_private: folders of prepared private datasets; if an original file of one of them
            occurs here under another domain, prepare refuses (the same picture would be paid for
            in two ledgers).
        class_names: the class list, where the source does not state one; labels outside it are
            dropped.
        splits: name -> share, adding up to 1; each becomes a dataset of its own.
        split_salt: public text; a record's split is decided by SHA-256(salt, pixel digest).
        records_per_shard: size of a tar.
        where: which images are taken, by their metadata (`sources/where.py`).
        group_key, max_records_per_group: of a private dataset whose privacy unit is a group of
            records: what they share (`sources/groups.py`) and how many of them stay, chosen by
            SHA-256(split_salt, pixel digest). Copies are then merged inside a group only, and a
            record without a group is left out.
    """

    name: str
    source: str
    visibility: Literal["public", "private"]
    domain: str | None = None
    ledger_home: str | None = None
    origin: str = ""
    image_short_side: int = 256
    jpeg_quality: int = 95
    deduplicate: Literal["exact", "perceptual", "none"] = "exact"
    exclude: tuple[str, ...] = ()
    other_private: tuple[str, ...] = ()
    class_names: tuple[str, ...] | None = None
    splits: dict[str, float] | None = None
    split_salt: str = "dp-pretrain"
    records_per_shard: int = 8_192
    where: str | None = None
    group_key: str | None = None
    max_records_per_group: int | None = None

    def __post_init__(self) -> None:
        def refuse(name: str, allowed: str) -> None:
            raise ValueError(f"{name}={getattr(self, name)!r} of dataset {self.name!r}: {allowed}")

        if self.visibility not in ("public", "private"):
            refuse("visibility", "must be public or private")
        if self.visibility == "private" and not self.domain:
            refuse("domain", "a private dataset must name the privacy domain that pays for it")
        if self.visibility == "public" and (self.domain or self.ledger_home):
            refuse("domain", "a public dataset has no privacy domain; leave domain and ledger out")
        if not 8 <= self.image_short_side <= 8192:
            refuse("image_short_side", "must lie between 8 and 8192 pixels")
        if not 1 <= self.jpeg_quality <= 100:
            refuse("jpeg_quality", "must lie between 1 and 100")
        if self.deduplicate not in ("exact", "perceptual", "none"):
            refuse("deduplicate", "must be exact, perceptual or none")
        if (self.group_key is None) != (self.max_records_per_group is None):
            refuse("group_key", "a group needs both a key and max_records_per_group")
        if self.group_key is not None and self.visibility == "public":
            refuse("group_key", "groups are privacy units of private datasets; leave it out")
        if self.max_records_per_group is not None and self.max_records_per_group < 1:
            refuse("max_records_per_group", "must be at least 1")
        if self.records_per_shard < 1:
            refuse("records_per_shard", "must be at least 1")
        if self.splits is not None:
            is_named = all(name and "/" not in name and name[0] not in "._" for name in self.splits)
            shares = list(self.splits.values())
            if not is_named or any(s <= 0 for s in shares) or abs(sum(shares) - 1) > 1e-9:
                refuse("splits", "must map plain names to positive shares that add up to 1")

    def conversion_rules(self) -> ConversionRules:
        """What decides the stored bytes of one picture."""
        return ConversionRules(
            short_side=self.image_short_side,
            jpeg_quality=self.jpeg_quality,
            with_perceptual_hash=self.deduplicate == "perceptual",
        )

    def digest(self) -> str:
        """SHA-256 (hex) of everything that decides the output bytes."""
        deciding = {k: v for k, v in asdict(self).items() if k != "other_private"}
        for name in ("where", "group_key", "max_records_per_group"):
            if deciding[name] is None:  # as before there was one
                del deciding[name]
        text = json.dumps({**deciding, "format": 1}, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()


@dataclass(frozen=True, kw_only=True)
class PrepareProgress:
    """How far prepare has come; of a private source, for the operator's eyes only."""

    stage: Literal["reading", "choosing", "writing"]
    num_done: int
    num_units: int
    num_records: int
    num_left_out: int


Progress = Callable[[PrepareProgress], None]
