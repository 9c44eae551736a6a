"""How fast `prepare` is beside its decoder alone, and what memory it takes as N grows.

    python benchmarks/prepare.py --quick --json FILE --markdown FILE

Measured so:
- Images/s per core: one worker, over photographs (JPEGs of several megapixels; `--photographs DIR`
  takes real ones, else procedural ones with grain are made) and over 341 x 256 JPEGs. The decoder's
  own rate is what `pipeline.data.images` needs to decode and shrink the same files from memory, in
  the same process, one after the other in each round; a ratio is the median over the rounds.
- Memory: most resident memory of a process (and its children) that prepares N small pictures, less
  that of one that prepares a tenth of them.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import stream_places as places
from stream import at_least_one, tell

from pipeline.data.images import decode_image, resize_short_side
from pipeline.data.prepare import PrepareConfig, prepare
from pipeline.storage import Location

Row = dict[str, Any]
SUFFIXES = (".jpg", ".jpeg", ".png", ".webp")


def prepare_folder(source: Path, destination: Path) -> int:
    """Prepare a folder of images with one worker; returns N."""
    config = PrepareConfig(
        name="benchmark", source=f"imagefolder:{source}", visibility="public", deduplicate="none"
    )
    manifests = prepare(config, Location(str(destination)), num_workers=1)
    return sum(manifest.num_records for manifest in manifests.values())


def decoder_seconds(files: Sequence[Path]) -> float:
    """Decode and shrink the files, already in memory, and nothing else."""
    contents = [file.read_bytes() for file in files]
    started = time.perf_counter()
    for content in contents:
        resize_short_side(decode_image(content).pixels, 256)
    return time.perf_counter() - started


def measure_rate(name: str, source: Path, folder: Path, options: argparse.Namespace) -> Row:
    """Images per second of prepare and of its decoder, and their ratio."""
    files = sorted(file for file in source.rglob("*") if file.suffix.lower() in SUFFIXES)
    rates: list[tuple[float, float]] = []
    for number in range(options.rounds):
        seconds = decoder_seconds(files)
        started = time.perf_counter()
        num_records = prepare_folder(source, folder / f"{name}-{number}")
        rates.append((num_records / (time.perf_counter() - started), len(files) / seconds))
        tell(f"  {name}: {rates[-1][0]:.1f} images/s, decoder alone {rates[-1][1]:.1f}")
    return {
        "section": "rate",
        "images": name,
        "num_images": len(files),
        "rounds": options.rounds,
        "images_per_second_per_core": statistics.median(ours for ours, _ in rates),
        "decoder_images_per_second": statistics.median(alone for _, alone in rates),
        "prepare_over_decoder": statistics.median(ours / alone for ours, alone in rates),
    }


def write_pictures(folder: Path, num: int, height: int, width: int) -> None:
    """A folder of procedural JPEGs; those of one size differ in a comment, not in pixels."""
    folder.mkdir(parents=True)
    pictures = places.make_pictures(height, width, min(num, places.NUM_PICTURES))
    for index in range(num):
        content = pictures[index % len(pictures)]
        mark = b"%08d" % index
        comment = b"\xff\xfe" + (len(mark) + 2).to_bytes(2, "big") + mark
        (folder / f"{index:08d}.jpg").write_bytes(content[:2] + comment + content[2:])


def measure_memory(folder: Path, options: argparse.Namespace) -> Row:
    """Most resident memory at N / 10 and at N."""
    found = []
    for num in (max(1, options.memory_images // 10), options.memory_images):
        source = folder / f"memory-{num}"
        write_pictures(source, num, 48, 64)
        asked = [sys.executable, __file__, "--child", str(source), str(folder / f"out-{num}")]
        answer = subprocess.run(asked, check=True, capture_output=True, text=True)
        found.append(json.loads(answer.stdout)["peak_bytes"])
        tell(f"  memory at N = {num}: {found[-1] / 2**20:.0f} MiB")
    return {
        "section": "memory",
        "num_images": options.memory_images,
        "peak_bytes_of_a_tenth": found[0],
        "peak_bytes": found[1],
        "memory_ratio": found[1] / found[0],
    }


def run_child(source: str, destination: str) -> None:
    """Prepare in this process; prints its peak memory and its largest child's."""
    prepare_folder(Path(source), Path(destination))
    # Not RUSAGE_SELF, which begins with the memory of the process that started this one.
    lines = Path("/proc/self/status").read_text().splitlines()
    own = int(next(line for line in lines if line.startswith("VmHWM")).split()[1])
    children = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    print(json.dumps({"peak_bytes": 1024 * (own + children)}))


def measure(options: argparse.Namespace, folder: Path) -> Row:
    """Everything, with the keys of the targets at the top."""
    photographs = options.photographs
    if photographs is None:
        photographs = folder / "photographs"
        write_pictures(photographs, options.num_photographs, *options.photograph_size)
    small = folder / "small"
    write_pictures(small, options.num_small, 256, 341)
    rows = [
        measure_rate("photographs", photographs, folder, options),
        measure_rate("341x256 JPEG", small, folder, options),
    ]
    memory = measure_memory(folder, options)
    return {
        "machine": {"cores": os.cpu_count(), "load_at_start": round(os.getloadavg()[0], 2)},
        "are_photographs_real": options.photographs is not None,
        "prepare_over_decoder_photographs": rows[0]["prepare_over_decoder"],
        "prepare_over_decoder_small": rows[1]["prepare_over_decoder"],
        "memory_ratio": memory["memory_ratio"],
        "rows": [*rows, memory],
    }


def table(result: Row) -> str:
    """The result for people, in Markdown."""
    lines = ["| images | images/s per core | decoder alone | ratio (target >= 0.8) |"]
    lines += ["|---|---|---|---|"]
    for row in result["rows"]:
        if row["section"] == "rate":
            rates = (row["images_per_second_per_core"], row["decoder_images_per_second"])
            lines.append(
                f"| {row['images']} | {rates[0]:.1f} | {rates[1]:.1f}"
                f" | {row['prepare_over_decoder']:.2f} |"
            )
    memory = result["rows"][-1]
    lines += ["", f"Memory: {memory['peak_bytes'] / 2**20:.0f} MiB at N = {memory['num_images']},"]
    lines[-1] += f" {memory['memory_ratio']:.2f} times that of a tenth."
    return "\n".join(lines)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The options. Exits with a sentence where they cannot be."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="fewer pictures and rounds")
    parser.add_argument("--json", type=Path, help="write the result here")
    parser.add_argument("--markdown", type=Path, help="write the tables here")
    parser.add_argument("--photographs", type=Path, help="a folder of real photographs")
    parser.add_argument("--photograph-size", nargs=2, type=at_least_one, default=[2000, 3000])
    parser.add_argument("--num-photographs", type=at_least_one, help="default 60, quick 12")
    parser.add_argument("--num-small", type=at_least_one, help="default 5000, quick 1000")
    parser.add_argument("--memory-images", type=at_least_one, help="default 100000, quick 5000")
    parser.add_argument("--rounds", type=at_least_one, help="default 5, quick 2")
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    quick = {"num_photographs": 12, "num_small": 1000, "memory_images": 5_000, "rounds": 2}
    whole = {"num_photographs": 60, "num_small": 5000, "memory_images": 100_000, "rounds": 5}
    for name, value in (quick if options.quick else whole).items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    for name in ("json", "markdown"):
        path = getattr(options, name)
        if path is not None and not path.parent.is_dir():
            parser.error(f"--{name} is {path}: there is no folder {path.parent}; make it first")
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print and write."""
    options = parse(arguments)
    if options.child:
        run_child(*options.child)
        return
    with tempfile.TemporaryDirectory(prefix="dp-pretrain-benchmark-") as folder:
        result = measure(options, Path(folder))
    text = table(result)
    print(text)
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    if options.markdown:
        options.markdown.write_text(text + "\n")


if __name__ == "__main__":
    main()
