"""What a private step costs: time, memory and counted FLOPs over those of the plain step.

    python benchmarks/step.py --sizes nano base --microbatch 16 --rounds 7 \\
        --methods plain ours opacus_ghost vmap --json FILE --markdown FILE

Measured so:
- Time: one process; each round runs every method once, in an order that is turned and reversed
  from round to round, after a warm-up. A ratio is the median, over the rounds, of a method's time
  over its baseline's in the same round, so that a drifting or shared machine touches both; with its
  quartiles. CPU time is that of all threads of the process.
- Memory: a process of its own for each method: the most that torch has allocated at any moment of a
  second step, beyond model and images: gradients or sums, activations, temporaries. (By torch's
  profiler on the CPU, by its allocator on CUDA.) "resident", on the CPU, is how far the process
  itself grows: what malloc keeps of blocks that were freed is in it, and what torch does not count.
- FLOPs: of matrix products, convolutions and attention, by torch's FlopCounterMode and what it does
  not know: products that add in place, with a vector, attention on the CPU, and groups.

What is compared is in step_methods.py.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import platform
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from importlib import metadata, util
from pathlib import Path
from typing import Any

import torch
from step_methods import METHODS, Step, Unavailable, Workload
from torch import profiler
from torch.utils import flop_counter
from torch.utils._python_dispatch import TorchDispatchMode

from pipeline.models.sizes import SIZES, num_visible_patches

DEFAULT_METHODS = ("plain", "ours", "ours_ghost", "ours_direct", "opacus_hooks", "opacus_ghost")
DEFAULT_METHODS += ("vmap", "vmap_chunked", "plain_bf16", "ours_bf16", "whole_plain", "whole_ours")

Rows = list[dict[str, Any]]
Times = dict[str, list[tuple[float, float]]]
"""(CPU seconds, wall seconds) of every round, by method."""


# -- measuring -------------------------------------------------------------------------------------


def time_rounds(steps: dict[str, Step], rounds: int, synchronise: Callable[[], None]) -> Times:
    """Every method once a round; no method always first, or always after the same one."""
    times: Times = {name: [] for name in steps}
    names = list(steps)
    for number in range(rounds):
        turn = number % len(names)
        order = names[turn:] + names[:turn]
        for name in order if number % 2 == 0 else order[::-1]:
            gc.collect()
            synchronise()
            start = time.process_time(), time.perf_counter()
            steps[name]()
            synchronise()
            times[name].append((time.process_time() - start[0], time.perf_counter() - start[1]))
        tell(f"  round {number + 1} of {rounds}")
    return times


def count_flops(step: Step) -> int:
    """Floating-point operations of a step that was run before: products, convolutions, attention.

    Raises:
        Unavailable: if a product was run that nobody counted; the ratio would be too small.
    """
    counter = flop_counter.FlopCounterMode(display=False, custom_mapping=FORMULAS)
    with counter, _Operations() as operations:
        step()
    unknown = {name for name, packet in operations.seen.items() if packet not in COUNTED}
    if products := sorted(filter(PRODUCT.search, unknown)):
        raise Unavailable(f"nobody counts {', '.join(products)}: add it to FORMULAS")
    return counter.get_total_flops()


class _Operations(TorchDispatchMode):
    """Which operations were run, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[str, Any] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.seen[str(func.overloadpacket)] = func.overloadpacket
        return func(*args, **(kwargs or {}))


def _added_product(total: Any, left: Any, right: Any, **_: Any) -> int:
    """total += left @ right, by shapes: [.., N, K] with [.., K, P] or [K]."""
    return 2 * math.prod(left) * (right[-1] if len(right) > 1 else 1)


def _attention(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    return flop_counter.sdpa_flop_count(query, key, value)


def _attention_backward(gradient: Any, query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    return flop_counter.sdpa_backward_flop_count(gradient, query, key, value)


def _convolution_backward(gradient: Any, inputs: Any, weight: Any, *more: Any, **_: Any) -> int:
    """Of inputs and weight each as much as the forward, groups or not."""
    transposed, wanted = more[4], more[7]
    forward = flop_counter.conv_flop_count(inputs, weight, gradient, transposed)
    return forward * sum(wanted[:2])


aten = torch.ops.aten
FORMULAS = {
    aten.convolution_backward: _convolution_backward,  # torch's is too much where there are groups
    **dict.fromkeys((aten.addmm_, aten.baddbmm_, aten.addmv, aten.addmv_), _added_product),
    aten.mv: lambda matrix, vector, **_: 2 * math.prod(matrix),
    aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
}
COUNTED = {*flop_counter.flop_registry, *FORMULAS}
SECOND_STEP = "the second step"
PRODUCT = re.compile("mm|mv|matmul|dot|attention|conv|linear_|einsum|addr|cdist|outer|addbmm")


class PeakMemory:
    """The most memory since `reset`, in bytes, and what is held now."""

    def __init__(self, device: str) -> None:
        self._is_cuda = device == "cuda"
        self.reset()

    def reset(self) -> None:
        """Forget what was before."""
        gc.collect()
        if self._is_cuda:
            torch.cuda.reset_peak_memory_stats()
            return
        try:
            Path("/proc/self/clear_refs").write_text("5")
        except OSError as error:
            raise Unavailable(f"peak memory needs Linux's /proc/self/clear_refs: {error}") from None

    def peak(self) -> int:
        """Since the reset."""
        return torch.cuda.max_memory_allocated() if self._is_cuda else _resident("VmHWM")

    def now(self) -> int:
        """At this moment."""
        return torch.cuda.memory_allocated() if self._is_cuda else _resident("VmRSS")


def _resident(entry: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{entry}:"))


def measure_memory(method: str, work: Workload) -> dict[str, int | None]:
    """What the second step of a method has allocated, beyond model and images, in bytes."""
    small = replace(work, size="micro", image_size=64, microbatch=2, logical_batch=2)
    METHODS[method].make(small)()  # loads libraries, which are nobody's step
    assert work.batch  # and with it the model
    memory = PeakMemory(work.device)
    before = memory.now()
    step = METHODS[method].make(work)
    step()
    memory.reset()
    step()
    grown = memory.peak() - before
    if work.device == "cuda":
        return {"memory_bytes": grown, "resident_bytes": None}
    del step
    return {"memory_bytes": most_allocated(method, replace(work)), "resident_bytes": grown}


def most_allocated(method: str, work: Workload) -> int:
    """The most that torch has allocated on the CPU in a second step, of what this method made."""
    assert work.batch  # and with it the model
    with profiler.profile(activities=[profiler.ProfilerActivity.CPU], profile_memory=True) as seen:
        step = METHODS[method].make(work)
        step()
        with profiler.record_function(SECOND_STEP):
            step()
    assert seen.profiler is not None and seen.profiler.kineto_results is not None
    events = seen.profiler.kineto_results.events()
    (started,) = [event.start_ns() for event in events if event.name() == SECOND_STEP]
    sizes = [(event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]"]
    alive = most = 0
    for moment, size in sorted(sizes, key=lambda each: each[0]):
        if moment >= started:
            most = max(most, alive)
        alive += size
    return most


def memory_of_a_child(method: str, options: argparse.Namespace, size: str, microbatch: int) -> Any:
    """`measure_memory` in a process of its own: its numbers, or why there are none."""
    command = [sys.executable, __file__, "--memory-of", method, "--sizes", size]
    command += ["--microbatch", str(microbatch), "--methods", method]
    for name in ("threads", "device", "image_size", "vmap_chunk", "logical_batch"):
        command += [f"--{name.replace('_', '-')}", str(getattr(options, name))]
    child = subprocess.run(command, capture_output=True, text=True, check=False)
    if child.returncode:
        last = (child.stderr.strip().splitlines() or ["no message"])[-1]
        return {"reason": f"the measuring process ended with {child.returncode}: {last}"}
    return json.loads(child.stdout.splitlines()[-1])


# -- rows ------------------------------------------------------------------------------------------


def benchmark(options: argparse.Namespace, size: str, microbatch: int) -> Iterator[Rows]:
    """One row for each method of one size and microbatch: with times, then with memory too."""
    work = workload(options, size, microbatch)
    rows = {name: empty_row(name, options, size, microbatch) for name in options.methods}
    steps: dict[str, Step] = {}
    flops: dict[str, int] = {}
    for name in options.methods:
        tell(f"{size}, microbatch {microbatch}: {name}: warm-up, FLOPs")
        try:
            steps[name] = ready(name, work)
        except Unavailable as error:
            rows[name]["reasons"]["skipped"] = str(error)
            tell(f"  skipped: {error}")
            continue
        try:
            if "compiled" in name:
                raise Unavailable("the counter does not see inside compiled kernels")
            flops[name] = count_flops(steps[name])
        except Unavailable as error:
            rows[name]["reasons"]["flop_ratio"] = str(error)
    add_times(rows, time_rounds(steps, options.rounds, synchroniser(options.device)), options)
    for name, row in rows.items():
        row["flops"] = flops.get(name)
        row["reasons"].setdefault("memory_ratio", "not asked for: --no-memory, or not yet measured")
    add_ratios(rows, "flop_ratio", "flops")
    yield list(rows.values())
    if options.no_memory:
        return
    steps.clear()  # leave the memory to the measuring processes
    del work
    gc.collect()
    if options.device == "cuda":
        torch.cuda.empty_cache()
    add_memory(rows, options, size, microbatch)
    add_ratios(rows, "memory_ratio", "memory_bytes")
    add_ratios(rows, "resident_ratio", "resident_bytes")
    yield list(rows.values())


def add_ratios(rows: dict[str, Any], ratio: str, value: str) -> None:
    """A row's value over its baseline's, where both were measured."""
    for row in rows.values():
        baseline = rows[row["baseline"]]
        if row[value] and baseline[value]:
            row[ratio] = row[value] / baseline[value]


def ready(name: str, work: Workload) -> Step:
    """A method's step, run so that what happens only once is over.

    Raises:
        Unavailable: if it cannot be had here, or fails and is not ours.
    """
    try:
        step = METHODS[name].make(work)
        step()
        if "compiled" in name:  # where the second may compile anew
            step()
    except torch.OutOfMemoryError as error:
        raise Unavailable("the device has too little memory") from error
    except Exception as error:
        if isinstance(error, Unavailable) or not METHODS[name].may_fail:
            raise
        first = (str(error).splitlines() or [""])[0]
        raise Unavailable(f"failed: {type(error).__name__}: {first}") from error
    return step


def empty_row(name: str, options: argparse.Namespace, size: str, microbatch: int) -> dict[str, Any]:
    """What is known of a row before anything is measured; null = not measured, see `reasons`."""
    row: dict[str, Any] = {"size": size, "microbatch": microbatch, "method": name}
    row["baseline"] = METHODS[name].baseline
    for measure in ("cpu", "wall"):
        row |= {f"{measure}_ratio": None, f"{measure}_ratio_quartiles": None}
        row |= {f"{measure}_seconds": None, f"{measure}_seconds_quartiles": None}
    for measure in ("memory", "resident"):
        row |= {f"{measure}_ratio": None, f"{measure}_bytes": None}
    row |= {"flop_ratio": None, "flops": None, "reasons": {}, "note": METHODS[name].note}
    for option in ("rounds", "threads", "device", "image_size", "vmap_chunk", "logical_batch"):
        row[option] = getattr(options, option)
    row |= {"torch": torch.__version__, "opacus": None, "cpu": cpu_name()}
    row["gpu"] = torch.cuda.get_device_name() if options.device == "cuda" else None
    if name.startswith("opacus") and util.find_spec("opacus"):
        row["opacus"] = metadata.version("opacus")
    return row


def add_times(rows: dict[str, Any], times: Times, options: argparse.Namespace) -> None:
    """Ratios round by round, then their median and quartiles."""
    for name, measured in times.items():
        row = rows[name]
        baseline = times.get(row["baseline"])
        for index, measure in enumerate(("cpu", "wall")):
            if measure == "cpu" and options.device != "cpu":
                row["reasons"]["cpu_ratio"] = "the host's CPU time says nothing of a device's step"
                continue
            summary = {f"{measure}_seconds": [both[index] for both in measured]}
            if baseline is None:
                row["reasons"][f"{measure}_ratio"] = f"{row['baseline']} could not be measured"
            else:
                pairs = zip(measured, baseline, strict=True)
                summary[f"{measure}_ratio"] = [mine[index] / other[index] for mine, other in pairs]
            for entry, values in summary.items():
                row[entry] = statistics.median(values)
                row[f"{entry}_quartiles"] = quartiles(values)


def add_memory(
    rows: dict[str, Any], options: argparse.Namespace, size: str, microbatch: int
) -> None:
    """Peak memory, one process after the other."""
    for name, row in rows.items():
        if "skipped" in row["reasons"]:
            continue
        tell(f"{size}, microbatch {microbatch}: {name}: memory")
        found = memory_of_a_child(name, options, size, microbatch)
        if "reason" in found:
            row["reasons"]["memory_ratio"] = found["reason"]
        else:
            row.update(found)
            row["reasons"].pop("memory_ratio", None)


def quartiles(values: Sequence[float]) -> list[float]:
    """The first and the third."""
    if len(values) == 1:
        return [values[0], values[0]]
    first, _, third = statistics.quantiles(values, n=4, method="inclusive")
    return [first, third]


def workload(
    options: argparse.Namespace, size: str, microbatch: int, is_alone: bool = False
) -> Workload:
    """The model and microbatch of a row."""
    return Workload(
        size=size,
        microbatch=microbatch,
        image_size=options.image_size,
        logical_batch=options.logical_batch,
        vmap_chunk=options.vmap_chunk,
        device=options.device,
        is_alone=is_alone,
    )


def synchroniser(device: str) -> Callable[[], None]:
    """Waits until the device has done what it was told."""
    return torch.cuda.synchronize if device == "cuda" else lambda: None


def cpu_name() -> str:
    """The processor, as the system calls it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def tell(message: str) -> None:
    """Progress, apart from the table."""
    print(message, file=sys.stderr, flush=True)


# -- the table -------------------------------------------------------------------------------------


def markdown(rows: Sequence[dict[str, Any]]) -> str:
    """The table, and what its reader must know."""
    first = rows[0]
    clock = "wall" if first["gpu"] else "CPU"
    lines = [
        f"| size | M | method | CPU time | wall time | memory | resident | FLOPs | {clock} s |"
    ]
    lines.append("|---" * 9 + "|")
    for row in rows:
        cells = [row["size"], str(row["microbatch"]), row["method"]]
        if "skipped" in row["reasons"]:
            cells += [f"skipped: {row['reasons']['skipped']}", *[""] * 5]
        else:
            cells += [_spread(row, "cpu_ratio"), _spread(row, "wall_ratio")]
            cells += [_memory(row, "memory"), _memory(row, "resident")]
            cells.append(_number(row["flop_ratio"], ".3f"))
            cells.append(_number(row["cpu_seconds"] or row["wall_seconds"], ".2f"))
        lines.append(f"| {' | '.join(cells)} |")
    where = first["gpu"] or first["cpu"]
    lines += [
        "",
        f"{where}, {first['threads']} thread(s), torch {first['torch']}, {first['image_size']} px. "
        f"Ratios to the plain step (time: median of {first['rounds']} rounds, quartiles in "
        "brackets; memory: the most that torch has allocated in a step beyond model and images, in "
        "its own process; resident: how far that process grows, malloc's reserves included).",
    ]
    notes: dict[str, list[str]] = {}
    for row in rows:
        for note in filter(None, [row["note"], *reasons(row)]):
            notes.setdefault(note, []).append(row["method"])
    for note, names in notes.items():
        lines.append(f"- {', '.join(dict.fromkeys(names))}: {note}.")
    if any(row["method"].startswith("whole") for row in rows):
        lines.append(
            f"- A logical step has {first['logical_batch']} images here; a real one has 4,096 and "
            "more, over which noise and optimizer are spread."
        )
    if any(row["method"] == "vmap_chunked" for row in rows):
        lines.append(f"- --vmap-chunk is {first['vmap_chunk']}.")
    return "\n".join(lines)


def reasons(row: dict[str, Any]) -> list[str]:
    """Why something of this row was not measured."""
    return [
        f"no {name.removesuffix('_ratio')} figure: {reason}"
        for name, reason in row["reasons"].items()
        if name != "skipped"
    ]


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _spread(row: dict[str, Any], ratio: str) -> str:
    if row[ratio] is None:
        return "-"
    first, third = row[f"{ratio}_quartiles"]
    return f"**{row[ratio]:.3f}** [{first:.3f}, {third:.3f}]"


def _memory(row: dict[str, Any], measure: str) -> str:
    if row[f"{measure}_bytes"] is None:
        return "-"
    mebibytes = row[f"{measure}_bytes"] / 2**20
    return f"{_number(row[f'{measure}_ratio'], '.2f')} ({mebibytes:,.0f} MiB)"


# -- the command line ------------------------------------------------------------------------------


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Options, checked before anything is measured."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--sizes", nargs="+", default=["nano", "base"], choices=tuple(SIZES), metavar="SIZE")
    add("--microbatch", nargs="+", default=[16], type=at_least(1), metavar="M")
    add("--methods", nargs="+", default=DEFAULT_METHODS, choices=tuple(METHODS), metavar="METHOD")
    add("--rounds", default=7, type=at_least(1), help="7 or more for figures to be quoted")
    add("--threads", default=1, type=at_least(1))
    add("--device", default="cpu", choices=("cpu", "cuda"))
    add("--image-size", default=224, type=at_least(1), help="a multiple of 16")
    add("--logical-batch", default=64, type=at_least(1), help="images of a whole step")
    add("--vmap-chunk", default=4, type=at_least(1), help="images at a time of vmap_chunked")
    add("--no-memory", action="store_true", help="do not measure memory")
    add("--json", type=Path, metavar="FILE", help="a list with one object for each row")
    add("--markdown", type=Path, metavar="FILE")
    add("--memory-of", choices=tuple(METHODS), help=argparse.SUPPRESS)  # in a child
    options = parser.parse_args(arguments)
    check(parser, options)
    needed = [METHODS[name].baseline for name in options.methods]
    needed += [METHODS[name].baseline for name in needed]  # ours_bf16 needs plain_bf16, it plain
    options.methods = list(dict.fromkeys([*needed[::-1], *options.methods]))
    return options


def check(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """What argparse cannot see; ends the program with a sentence."""
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device is cuda and torch sees no CUDA device here; use --device cpu")
    try:
        num_visible_patches(options.image_size, 16)
    except ValueError as error:
        parser.error(f"--image-size: {error}")
    whole = [name for name in options.methods if name.startswith("whole")]
    for microbatch in options.microbatch if whole else ():
        if options.logical_batch % microbatch:
            parser.error(
                f"--logical-batch is {options.logical_batch}; for {whole[0]} it must be a multiple "
                f"of the microbatch, {microbatch}"
            )
    for option in ("json", "markdown"):
        file = getattr(options, option)
        if file is not None and not file.absolute().parent.is_dir():
            parser.error(f"--{option}: the folder of {file} does not exist; make it first")


def at_least(least: int) -> Callable[[str], int]:
    """An integer not below `least`."""

    def convert(text: str) -> int:
        if not text.lstrip("-").isdigit() or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r} is not an integer >= {least}")
        return int(text)

    return convert


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print the table, write the files; whenever there is more of it."""
    options = parse(arguments)
    torch.set_num_threads(options.threads)
    if options.memory_of:
        work = workload(options, options.sizes[0], options.microbatch[0], is_alone=True)
        try:
            print(json.dumps(measure_memory(options.memory_of, work)))
        except (Unavailable, torch.OutOfMemoryError) as error:
            print(json.dumps({"reason": str(error).splitlines()[0]}))
        return
    done: Rows = []
    for size in options.sizes:
        for microbatch in options.microbatch:
            rows: Rows = []
            for rows in benchmark(options, size, microbatch):
                save([*done, *rows], options)
            done += rows
    print(markdown(done))


def save(rows: Rows, options: argparse.Namespace) -> None:
    """Write the files that were asked for."""
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")
    if options.markdown:
        options.markdown.write_text(markdown(rows) + "\n")


if __name__ == "__main__":
    main()
