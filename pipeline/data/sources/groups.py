"""What is decided of a record by its metadata: whether it is taken, and which group it is in."""

from __future__ import annotations

import re
import urllib.parse
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from pipeline.data.sources.where import Row, Where

_PATTERN = re.compile(r"(host\()?\s*([A-Za-z_][A-Za-z0-9_]*)\s*(\))?")


class GroupKey:
    """Who a record belongs to, by its metadata: `COLUMN`, or `host(COLUMN)` of a column of URLs.

    Column names in any case. Text and whole numbers are groups; what is missing, null, empty or of
    another kind is none, and so is a URL without a host.

    Raises:
        ValueError: the text is no such key.
    """

    def __init__(self, text: str) -> None:
        found = _PATTERN.fullmatch(text.strip())
        if found is None or bool(found[1]) != bool(found[3]):
            raise ValueError(
                f"group_key={text!r} is not understood: write a column of the metadata, as in"
                " uploader, or host(url) for the host of a column of URLs"
            )
        self.text, self.name, self.is_host = text, found[2].lower(), bool(found[1])

    def of(self, row: Row) -> str | None:
        """The group of an image with this metadata; None where it has none."""
        value: Any = row.get(self.name)
        if isinstance(value, int) and not isinstance(value, bool):
            value = str(value)
        if not isinstance(value, str) or not value.strip():
            return None
        if not self.is_host:
            return value
        try:
            host = urllib.parse.urlsplit(value.strip()).hostname
        except ValueError:
            return None
        return host.removeprefix("www.") or None if host else None


@dataclass(frozen=True)
class RowRules:
    """What is asked of an image's metadata; nothing is, where both are None."""

    where: Where | None = None
    group_key: GroupKey | None = None

    @property
    def names(self) -> set[str]:
        """The columns that are needed, in lower case."""
        named = set() if self.where is None else set(self.where.names)
        return named if self.group_key is None else named | {self.group_key.name}

    @property
    def text(self) -> str:
        """The rules as they were given, for an error."""
        parts = [] if self.where is None else [f"where={self.where.text!r}"]
        return ", ".join(
            parts if self.group_key is None else [*parts, f"group_key={self.group_key.text!r}"]
        )

    def __bool__(self) -> bool:
        return self.where is not None or self.group_key is not None

    def require(self, columns: Iterable[str], place: str) -> None:
        """Raise ValueError unless all columns that are named exist."""
        known = {column.lower() for column in columns}
        if missing := sorted(self.names - known):
            raise ValueError(
                f"{self.text}: {place} has no column {missing[0]!r}; it has"
                f" {', '.join(sorted(known)) or 'none'}"
            )

    def judge(self, row: Row) -> tuple[str | None, str | None]:
        """(why the image is left out or None, its group or None)."""
        if self.where is not None and not self.where.keeps(row):
            return "filtered", None
        if self.group_key is None:
            return None, None
        group = self.group_key.of(row)
        return (None, group) if group is not None else ("no_group", None)


NO_RULES = RowRules()
