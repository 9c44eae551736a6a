"""How fast images reach the ranks, what is read for it, and what it costs in time and memory.

    python benchmarks/stream.py --quick --json FILE --markdown FILE      # under five minutes
    python benchmarks/stream.py                                          # more pictures and rounds

Measured so:
- Images/s: procedural 341 x 256 JPEGs (`prepare` stores such), decoded and randomly cropped to 224.
  A bare thread pool, our thread-pool stream, our Ray Data stream with 1, 2 and 4 ranks, and Ray
  Data's own `read_webdataset` (sequential) do the same reads and decodes on equal threads, one
  after the other in one process, in an order that turns from round to round; a ratio is the median
  over the rounds of a method's rate over the bare pool's in the same round. From a local disk
  (its files in the page cache), from an S3 server on this machine, and from the same with every
  request 30 ms later. `rclone serve s3` where rclone is installed, else moto's server.
- Bytes read per useful byte: what the process reads (/proc/self/io), or the S3 server sends (its
  headers too), over the stored bytes of the records that were asked for; in a run of its own, after
  the index was opened once.
- Plan: one step's record ids at B = 98,304, after the first step's table of counts.
- Reader memory: resident memory that is no file's, so without the mapped index, in a process of its
  own that loads what a data task loads and reads records of random steps; `reader_added_bytes` is
  what the reading added to it at the largest N.
- Ray's own costs: 8 ranks and tiny pictures in units of 4 (control plane); time to the first unit
  of 6,000 steps on a cluster that ran a pipeline before.

What is compared is in stream_methods.py, what is read in stream_places.py.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import stream_methods as methods
import stream_places as places

from pipeline.data.shards import ShardStore
from pipeline.privacy.sampling import PoissonPlan

SECTIONS = ("local", "s3", "plan", "memory", "ray")
RANKS = (1, 2, 4)
VIP_BATCH = 98_304
SLOW_SECONDS = 0.03
NUM_STEPS_OF_A_PHASE = 6_000
PLAN_SIZES = (10**6, 10**7, 10**8, 10**9, 2 * 10**9)

Row = dict[str, Any]


# -- images per second -----------------------------------------------------------------------------


def measure_rates(
    work: methods.Work, place: str, options: argparse.Namespace, *, has_ray: bool
) -> list[Row]:
    """A row a method: its rate, and the median ratio to the bare pool's of the same round."""
    ways: dict[str, Callable[[], methods.Timing]] = {
        "bare_pool": lambda: methods.bare_pool(work),
        "thread_pool_stream": lambda: methods.thread_pool_stream(work),
    }
    if has_ray:
        for ranks in options.ranks:
            ways[f"ray_stream_{ranks}"] = lambda ranks=ranks: methods.ray_stream(work, ranks)
        ways["read_webdataset"] = lambda: methods.sequential_webdataset(work)
    found: dict[str, list[methods.Timing]] = {name: [] for name in ways}
    methods.bare_pool(work)  # warms the page cache
    for number in range(options.rounds):
        names = list(ways)
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            found[name].append(ways[name]())
            tell(f"  {place}, {name}: {found[name][-1].images_per_second:.0f} images/s")
    bare = [timing.images_per_second for timing in found["bare_pool"]]
    return [
        {
            "section": "images",
            "place": place,
            "method": name,
            "threads": work.threads,
            "rounds": options.rounds,
            "num_images": work.num_images,
            "images_per_second": statistics.median(t.images_per_second for t in timings),
            "over_bare_pool": statistics.median(
                timing.images_per_second / base for timing, base in zip(timings, bare, strict=True)
            ),
            "first_seconds": statistics.median(timing.first_seconds for timing in timings),
        }
        for name, timings in found.items()
    ]


def bytes_per_useful_byte(work: methods.Work, bytes_read: Callable[[], int]) -> float:
    """Of the records of all steps, unit by unit as the stream reads them, by a store of its own."""
    store = ShardStore(work.root)
    store.labels([0])
    before = bytes_read()
    for ids in work.step_ids:
        for start in range(0, len(ids), work.rows_per_unit):
            store.read(ids[start : start + work.rows_per_unit])
    return (bytes_read() - before) / work.useful_bytes


def bytes_read_by_this_process() -> int:
    """Bytes that read calls returned so far."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(dict(line.split(": ") for line in lines)["rchar"])


def measure_local(folder: Path, options: argparse.Namespace, has_ray: bool) -> Row:
    """Rates and bytes from a local disk."""
    work = workload(str(folder / "pictures"), options)
    rows = measure_rates(work, "local disk", options, has_ray=has_ray)
    ratio = ratio_of(rows, "thread_pool_stream")
    waste = bytes_per_useful_byte(work, bytes_read_by_this_process)
    return {"rows": rows, "stream_over_pool": ratio, "bytes_per_useful_byte": waste}


def measure_s3(road: places.Road, options: argparse.Namespace, has_ray: bool) -> Row:
    """Rates and bytes from an S3 server on this machine, as it is and with slow requests."""
    work = workload(f"s3://{places.BUCKET}", options)
    work.store.labels([0])
    found: Row = {"rows": []}
    for delay in (0.0, SLOW_SECONDS):
        road.set_delay(delay)
        suffix = f", {1000 * delay:.0f} ms later" if delay else ""
        place = f"S3 ({places.server_name()}{suffix})"
        rows = measure_rates(work, place, options, has_ray=has_ray)
        found["rows"] += rows
        name = "s3_slow" if delay else "s3"
        found[f"stream_over_pool_{name}"] = ratio_of(rows, "thread_pool_stream")
    road.set_delay(0.0)
    found["bytes_per_useful_byte_s3"] = bytes_per_useful_byte(work, road.num_bytes)
    return found


def workload(root: str, options: argparse.Namespace) -> methods.Work:
    """The steps that every method reads."""
    return methods.Work(
        root=root,
        batch_size=max(1, options.num_images // 4),
        num_steps=4,
        rows_per_unit=options.rows_per_unit,
        image_size=options.image_size,
        threads=options.threads,
    )


def ratio_of(rows: Sequence[Row], method: str) -> float:
    """A method's rate over the bare pool's."""
    return next(row["over_bare_pool"] for row in rows if row["method"] == method)


# -- the plan --------------------------------------------------------------------------------------


def measure_plan(options: argparse.Namespace) -> Row:
    """Milliseconds of a step's record ids at ViP's batch, by the number of records."""
    rows = []
    for num_records in PLAN_SIZES:
        plan = PoissonPlan(
            key=b"p" * 32, num_records=num_records, sampling_probability=VIP_BATCH / num_records
        )
        started = time.perf_counter()
        plan.record_ids(0)
        first = time.perf_counter() - started
        times = []
        for step in range(1, 1 + options.plan_steps):
            started = time.perf_counter()
            plan.record_ids(step)
            times.append(1000 * (time.perf_counter() - started))
        row = {"section": "plan", "num_records": num_records, "plan_ms": statistics.median(times)}
        rows.append({**row, "first_plan_ms": 1000 * first})
        tell(f"  plan at N = {num_records:.0e}: {rows[-1]['plan_ms']:.1f} ms")
    return {"rows": rows, "plan_ms_2e9": rows[-1]["plan_ms"]}


# -- memory of a reader ----------------------------------------------------------------------------


def measure_memory(folder: Path, options: argparse.Namespace) -> Row:
    """Memory of a process that reads, for a small and a large index."""
    rows = []
    for num_records in options.reader_records:
        root = folder / f"index-{num_records}"
        places.make_large_index(root, num_records)
        asked = [sys.executable, str(Path(__file__).with_name("stream_reader.py")), str(root)]
        answer = subprocess.run(asked, check=True, capture_output=True, text=True)
        row = {"section": "memory", "num_records": num_records, **json.loads(answer.stdout)}
        rows.append({**row, "index_bytes": (root / "index.arrow").stat().st_size})
        tell(f"  reader at N = {num_records:.0e}: {row['anonymous_bytes'] / 2**20:.1f} MiB")
        (root / "index.arrow").unlink()
    most = max(rows, key=lambda row: row["num_records"])
    least = min(rows, key=lambda row: row["num_records"])
    return {
        "rows": rows,
        "reader_memory_ratio": most["anonymous_bytes"] / least["anonymous_bytes"],
        "reader_added_bytes": most["anonymous_bytes"] - most["anonymous_bytes_before"],
        "index_bytes_per_record": most["index_bytes"] / most["num_records"],
    }


# -- Ray's own costs -------------------------------------------------------------------------------


def measure_ray(folder: Path, options: argparse.Namespace) -> Row:
    """Units per second of one pipeline over tiny pictures; time to the first unit of a phase."""
    tiny = {"batch_size": 4, "rows_per_unit": 4, "image_size": 8, "threads": options.threads}
    rows = []
    for ranks in (1, 8):
        num_steps = max(1, options.control_units // ranks)
        work = methods.Work(root=str(folder / "tiny"), num_steps=num_steps, **tiny)
        arrivals = methods.deal(
            work.config(ranks), lambda units: [time.perf_counter() for _ in units], work.threads
        )
        begin = max(rank[0] for rank in arrivals)
        end = max(rank[-1] for rank in arrivals)
        counted = sum(moment > begin for rank in arrivals for moment in rank)
        rate = counted / max(end - begin, 1e-9)
        rows.append({"section": "control plane", "ranks": ranks, "units_per_second": rate})
        tell(f"  control plane, {ranks} ranks: {rate:.0f} units/s")
    work = workload(str(folder / "pictures"), options)
    seconds = [methods.first_unit_seconds(work, options.phase_steps) for _ in range(options.rounds)]
    first = statistics.median(seconds)
    tell(f"  first unit of {options.phase_steps} steps: {first:.2f} s")
    rows.append({"section": "start", "num_steps": options.phase_steps, "first_unit_seconds": first})
    return {
        "rows": rows,
        "units_per_second": rows[0]["units_per_second"],
        "units_per_second_8_ranks": rows[1]["units_per_second"],
        "first_microbatch_seconds": first,
    }


@contextlib.contextmanager
def ray_cluster() -> Iterator[None]:
    """A local Ray of this benchmark's own, unless there is one."""
    import ray  # noqa: PLC0415

    if ray.is_initialized():
        yield
        return
    cores = os.cpu_count() or 1
    ray.init(
        address="local",
        num_cpus=max(6, cores + 4),
        include_dashboard=False,
        log_to_driver=False,
        logging_level="ERROR",
        runtime_env={"env_vars": {"OMP_NUM_THREADS": "1"}},
    )
    try:
        yield
    finally:
        ray.shutdown()


# -- the whole -------------------------------------------------------------------------------------


def measure(options: argparse.Namespace, folder: Path) -> Row:
    """Everything that was asked for; what cannot be had here is under `skipped`, with why."""
    sections = set(options.sections)
    result: Row = {"machine": machine(options), "rows": [], "skipped": {}}

    def add(found: Row) -> None:
        result["rows"] += found.pop("rows")
        result.update(found)

    with contextlib.ExitStack() as stack:
        if sections & {"local", "s3", "ray"}:
            tell("making pictures")
            height, width = options.picture_size
            pictures = places.make_pictures(height, width)
            places.make_dataset(folder / "pictures", options.num_records, pictures)
            places.make_dataset(folder / "tiny", 1_000, places.make_pictures(8, 8))
        road = None
        if "s3" in sections:
            try:
                port = stack.enter_context(places.s3_server(folder / "pictures"))
                road = places.Road(port)
                stack.callback(road.close)
                stack.enter_context(s3_environment(road.port))
            except places.Unavailable as reason:
                result["skipped"]["s3"] = str(reason)
        has_ray = bool(options.ranks) and bool(sections & {"local", "s3", "ray"})
        if has_ray:
            stack.enter_context(ray_cluster())
        if "local" in sections:
            add(measure_local(folder, options, has_ray))
        if road is not None:
            add(measure_s3(road, options, has_ray))
        if "ray" in sections and has_ray:
            add(measure_ray(folder, options))
    if "plan" in sections:
        add(measure_plan(options))
    if "memory" in sections:
        add(measure_memory(folder, options))
    for section in SECTIONS:
        if section not in sections:
            result["skipped"][section] = "not asked for (--sections)"
    if not options.ranks:
        result["skipped"]["ray"] = "no ranks asked for (--ranks)"
    return result


@contextlib.contextmanager
def s3_environment(port: int) -> Iterator[None]:
    """How pyarrow and Ray's workers find the server: as for any storage, by the environment."""
    names = {
        "AWS_ACCESS_KEY_ID": places.KEY,
        "AWS_SECRET_ACCESS_KEY": places.SECRET,
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
    }
    before = {name: os.environ.get(name) for name in names}
    os.environ.update(names)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


def machine(options: argparse.Namespace) -> Row:
    """What the numbers belong to."""
    return {
        "cores": os.cpu_count(),
        "processor": platform.processor() or platform.machine(),
        "threads": options.threads,
        "python": platform.python_version(),
        "load_at_start": round(os.getloadavg()[0], 2),
    }


def table(result: Row) -> str:
    """The result for people, in Markdown."""
    lines = ["| place | method | images/s | over the bare pool | first images after s |"]
    lines += ["|---|---|---|---|---|"]
    for row in result["rows"]:
        if row["section"] == "images":
            lines.append(
                f"| {row['place']} | {row['method']} | {row['images_per_second']:.0f}"
                f" | {row['over_bare_pool']:.2f} | {row['first_seconds']:.2f} |"
            )
    lines += ["", "| what | value | target |", "|---|---|---|"]
    for name, target in TARGETS.items():
        if name in result:
            lines.append(f"| {name} | {result[name]:.3g} | {target} |")
    for row in result["rows"]:
        if row["section"] == "plan":
            lines.append(f"| plan at N = {row['num_records']:.0e} | {row['plan_ms']:.1f} ms | |")
    for name, reason in result["skipped"].items():
        lines.append(f"| {name} | skipped: {reason} | |")
    return "\n".join(lines)


TARGETS = {
    "stream_over_pool": ">= 0.9",
    "stream_over_pool_s3": ">= 0.9",
    "stream_over_pool_s3_slow": ">= 0.9",
    "bytes_per_useful_byte": "<= 1.05",
    "bytes_per_useful_byte_s3": "<= 1.05 and HTTP headers",
    "plan_ms_2e9": "<= 50",
    "reader_memory_ratio": "<= 1.1",
    "reader_added_bytes": "",
    "index_bytes_per_record": "<= 40",
    "first_microbatch_seconds": "<= 3",
    "units_per_second": "",
    "units_per_second_8_ranks": "",
}


def tell(line: str) -> None:
    """Progress, beside the result."""
    print(line, file=sys.stderr, flush=True)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The options. Exits with a sentence where they cannot be."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="fewer pictures and rounds")
    parser.add_argument("--json", type=Path, help="write the result here")
    parser.add_argument("--markdown", type=Path, help="write the tables here")
    parser.add_argument("--sections", nargs="+", choices=SECTIONS, default=list(SECTIONS))
    parser.add_argument("--ranks", nargs="*", type=at_least_one, default=list(RANKS))
    parser.add_argument("--threads", type=at_least_one, default=os.cpu_count() or 1)
    parser.add_argument("--rounds", type=at_least_one, help="default 5, quick 2")
    parser.add_argument("--num-records", type=at_least_one, help="default 32768, quick 8192")
    parser.add_argument("--num-images", type=at_least_one, help="read by a method in a round")
    parser.add_argument("--rows-per-unit", type=at_least_one, default=128)
    parser.add_argument("--image-size", type=at_least_one, default=224)
    parser.add_argument("--picture-size", nargs=2, type=at_least_one, default=[256, 341])
    parser.add_argument("--plan-steps", type=at_least_one, default=20)
    parser.add_argument("--phase-steps", type=at_least_one, default=NUM_STEPS_OF_A_PHASE)
    parser.add_argument("--control-units", type=at_least_one, help="default 4000, quick 800")
    parser.add_argument("--reader-records", nargs="+", type=at_least_one, default=[10**6, 10**8])
    options = parser.parse_args(arguments)
    quick = {"rounds": 2, "num_records": 8192, "num_images": 4096, "control_units": 800}
    whole = {"rounds": 5, "num_records": 32_768, "num_images": 16_384, "control_units": 4000}
    for name, value in (quick if options.quick else whole).items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    for name in ("json", "markdown"):
        path = getattr(options, name)
        if path is not None and not path.parent.is_dir():
            parser.error(f"--{name} is {path}: there is no folder {path.parent}; make it first")
    return options


def at_least_one(text: str) -> int:
    """A count of at least 1."""
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"is {text!r}: it must be a whole number >= 1")
    return value


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print and write."""
    options = parse(arguments)
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
