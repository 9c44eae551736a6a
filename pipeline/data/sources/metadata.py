"""What is said of the images of a folder in a file beside them."""

from __future__ import annotations

import csv
import io
import json
import posixpath
from collections.abc import Iterable, Sequence
from typing import Any

import pyarrow as pa
from pyarrow import parquet

from pipeline.data.sources.where import lowered
from pipeline.storage import Location

NAMES = ("metadata.csv", "metadata.jsonl", "metadata.parquet")


def read_metadata(root: Location, files: Sequence[str]) -> dict[str, dict[str, Any]] | None:
    """By the name of the image below the root: its row, columns in lower case.

    Args:
        root: the folder.
        files: the names of all files below it.

    Returns:
        None where there is no metadata file. Rows that name a file outside the root are not in it.

    Raises:
        ValueError: a metadata file that cannot be read, or has no column file_name.
    """
    found = [name for name in files if posixpath.basename(name) in NAMES]
    if not found:
        return None
    rows: dict[str, dict[str, Any]] = {}
    for name in found:
        try:
            table = list(_rows(root / name, name))
        except (OSError, ValueError, csv.Error, pa.ArrowException) as error:
            raise ValueError(f"source={root}/{name} cannot be read: {error}") from None
        for each in table:
            row = lowered(each)
            if not isinstance(row.get("file_name"), str):
                raise ValueError(
                    f"source={root}/{name} has a row without file_name: every row must name its"
                    " image, relative to the metadata file"
                )
            whole = posixpath.normpath(posixpath.join(posixpath.dirname(name), row["file_name"]))
            rows[whole] = row
    return rows


def _rows(place: Location, name: str) -> Iterable[dict[str, Any]]:
    content = place.read_bytes()
    if name.endswith(".parquet"):
        return list(parquet.read_table(io.BytesIO(content)).to_pylist())
    text = content.decode("utf-8-sig")
    if name.endswith(".jsonl"):
        return [json.loads(line) for line in text.splitlines() if line.strip()]
    return [
        {column: _number(value) for column, value in row.items() if column is not None}
        for row in csv.DictReader(io.StringIO(text))
    ]


def _number(text: Any) -> Any:
    """What stands in a CSV cell: a number where it reads as one; nothing where it is empty."""
    if not isinstance(text, str) or not text.strip():
        return None
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
