"""What a private step costs over a plain one: CPU time, wall time, peak memory, counted FLOPs.

    python benchmarks/step.py --sizes nano base --microbatch 16 --methods plain ours opacus_ghost \\
        --rounds 7 --json step.json --markdown step.md

One process computes all methods round by round, in rotated order, so that what else the machine
does falls on all alike. A ratio is the median, over rounds, of a method's time over that of its
baseline in the same round; quartiles show the spread. The baseline is the plain step: forward and
backward of the mean loss of the same model and microbatch; of the bf16 methods the plain bf16 step,
of `whole_ours` the plain logical step.

Peak memory is measured in a process of its own per method: what the step needs beside the model and
its images. On the CPU that is the kernel's high-water mark of the resident set, reset before a
third step, with malloc told to return freed blocks at once: it counts every allocator and leaves
out what is merely cached. On a GPU it is what the allocator has handed out at most.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import methods
import peers
import torch
from methods import Method, Problem, Unavailable, make_problem
from torch.utils.flop_counter import (
    FlopCounterMode,
    sdpa_backward_flop_count,
    sdpa_flop_count,
)

from pipeline.models.sizes import SIZES

METHODS: dict[str, Callable[[Problem], Method]] = {
    "plain": methods.plain,
    "ours": methods.ours,
    "ours_ghost": partial(methods.ours, mode="ghost"),
    "ours_direct": partial(methods.ours, mode="direct"),
    "plain_compiled": partial(methods.plain, is_compiled=True),
    "ours_compiled": partial(methods.ours, is_compiled=True),
    "opacus_hooks": peers.opacus_hooks,
    "opacus_ghost": peers.opacus_ghost,
    "vmap": peers.vmap,
    "plain_bf16": partial(methods.plain, is_bf16=True),
    "ours_bf16": partial(methods.ours, is_bf16=True),
    "plain_compiled_bf16": partial(methods.plain, is_bf16=True, is_compiled=True),
    "ours_compiled_bf16": partial(methods.ours, is_bf16=True, is_compiled=True),
    "whole_plain": methods.whole_plain,
    "whole_ours": methods.whole_ours,
    "empty_plain": partial(methods.whole_plain, is_empty=True),
    "empty_ours": partial(methods.whole_ours, is_empty=True),
}
MAY_FAIL = ("opacus", "vmap", "plain_compiled", "ours_compiled")
"""Methods that rest on what is not ours; where one fails, its row says so and the rest goes on."""

aten = torch.ops.aten


def baseline_of(method: str) -> str:
    """The plain step that a method's ratios are taken to."""
    if method.startswith(("whole", "empty")):
        return f"{method.partition('_')[0]}_plain"
    return "plain_bf16" if method.endswith("bf16") else "plain"


# -- measures --------------------------------------------------------------------------------------


def timed(step: Callable[[], None], device: str) -> tuple[float, float]:
    """(CPU seconds of all threads, wall seconds) of one step."""
    gc.collect()
    _synchronise(device)
    start = time.process_time(), time.perf_counter()
    step()
    _synchronise(device)
    return time.process_time() - start[0], time.perf_counter() - start[1]


def counted_flops(step: Callable[[], None]) -> int:
    """Operations of all matrix products, convolutions and attentions of a step.

    torch's counter does not know products in place, with a vector, or attention on the CPU; without
    them it would miss a third of our step.
    """

    def product(_total: Any, left: Any, right: Any, **_: Any) -> int:
        return 2 * math.prod(left) * (right[-1] if len(right) > 1 else 1)

    def attention(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
        return sdpa_flop_count(query, key, value)

    def attention_backward(grad: Any, query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
        return sdpa_backward_flop_count(grad, query, key, value)

    counter = FlopCounterMode(
        display=False,
        custom_mapping={
            **dict.fromkeys((aten.addmm_, aten.baddbmm_, aten.addmv, aten.addmv_), product),
            aten.mv: partial(product, None),
            aten._scaled_dot_product_flash_attention_for_cpu: attention,
            aten._scaled_dot_product_flash_attention_for_cpu_backward: attention_backward,
        },
    )
    with counter:
        step()
    return counter.get_total_flops()


def peak_bytes(name: str, problem: Problem) -> int:
    """What the method's step needs at most beside model and images; alone in its process."""
    device = problem.images.device.type
    METHODS[name](make_problem("micro", 2, device, 2)).step()  # libraries load at first use
    gc.collect()
    before = torch.cuda.memory_allocated() if device == "cuda" else _status_bytes("VmRSS")
    step = METHODS[name](problem).step
    step()
    step()
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        step()
        return torch.cuda.max_memory_allocated() - before
    Path("/proc/self/clear_refs").write_text("5")
    step()
    return _status_bytes("VmHWM") - before


def _status_bytes(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {field}")


def _synchronise(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def memory_elsewhere(name: str, size: str, microbatch: int, options: argparse.Namespace) -> int:
    """`peak_bytes` in a new process."""
    if options.device == "cpu" and not os.access("/proc/self/clear_refs", os.W_OK):
        raise Unavailable("memory: this system has no /proc/self/clear_refs")
    command = [sys.executable, __file__, "--sizes", size, "--microbatch", str(microbatch)]
    command += ["--methods", name, "--memory-only", "--device", options.device]
    command += ["--threads", str(options.threads), "--logical-batch", str(2 * microbatch)]
    command += ["--per-image-gib", str(options.per_image_gib)]
    paths = [str(Path(__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(paths),
        "MALLOC_MMAP_THRESHOLD_": "65536",
        "MALLOC_TRIM_THRESHOLD_": "65536",
    }
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise Unavailable(f"memory: its process ended with {done.returncode} ({last})")
    return int(done.stdout)


# -- one size and microbatch -----------------------------------------------------------------------


def ready(name: str, problem: Problem) -> Method:
    """Build a method and run it twice, so that what happens once is over."""
    try:
        method = METHODS[name](problem)
        method.step()
        if not name.startswith("whole"):
            method.step()
    except torch.OutOfMemoryError as error:
        raise Unavailable("the device has too little memory") from error
    except Unavailable:
        raise
    except Exception as error:
        if name.startswith(MAY_FAIL):
            raise Unavailable(f"failed: {type(error).__name__}: {error}") from error
        raise
    return method


def measure(size: str, microbatch: int, options: argparse.Namespace) -> list[dict[str, Any]]:
    """The rows of all methods at one size and microbatch."""
    problem = make_problem(
        size, microbatch, options.device, options.logical_batch, int(options.per_image_gib * 2**30)
    )
    wanted = dict.fromkeys(each for name in options.methods for each in (baseline_of(name), name))
    runnable: dict[str, Method] = {}
    reasons: dict[str, list[str]] = {name: [] for name in wanted}
    for name in wanted:
        _tell(f"{size}, microbatch {microbatch}: warming up {name}")
        try:
            runnable[name] = ready(name, problem)
        except Unavailable as why:
            reasons[name].append(str(why))
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in runnable}
    for number in range(options.rounds):
        _tell(f"{size}, microbatch {microbatch}: round {number + 1} of {options.rounds}")
        names = list(runnable)
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            seconds[name].append(timed(runnable[name].step, options.device))
    flops: dict[str, int] = {}
    memory: dict[str, int] = {}
    for name, method in runnable.items():
        _tell(f"{size}, microbatch {microbatch}: FLOPs and memory of {name}")
        if "flops" in options.without:
            reasons[name].append("FLOPs: left out by --without")
        elif "compiled" in name or name.startswith(("whole", "empty")):
            reasons[name].append("FLOPs: counted of eager microbatches only")
        else:
            flops[name] = counted_flops(method.step)
    notes = {name: method.note for name, method in runnable.items()}
    runnable.clear()
    for name in seconds:
        if "memory" in options.without:
            reasons[name].append("memory: left out by --without")
            continue
        try:
            memory[name] = memory_elsewhere(name, size, microbatch, options)
        except Unavailable as why:
            reasons[name].append(str(why))
    shared = {"size": size, "microbatch": microbatch, **environment(options)}
    return [
        {
            **shared,
            "method": name,
            "baseline": baseline_of(name),
            **_times("cpu", name, seconds, 0),
            **_times("wall", name, seconds, 1),
            "memory_ratio": _ratio(memory, name),
            "memory_bytes": memory.get(name),
            "flop_ratio": _ratio(flops, name),
            "flops": flops.get(name),
            "note": notes.get(name) or None,
            "reason": "; ".join(reasons[name]) or None,
        }
        for name in wanted
    ]


def _times(
    clock: str, name: str, seconds: dict[str, list[tuple[float, float]]], which: int
) -> dict[str, Any]:
    """Medians and quartiles of a method's seconds, and of their ratio to the baseline's."""
    values: dict[str, list[float] | None] = {"seconds": None, "ratio": None}
    if name in seconds:
        values["seconds"] = [pair[which] for pair in seconds[name]]
        if (baseline := seconds.get(baseline_of(name))) is not None:
            pairs = zip(seconds[name], baseline, strict=True)
            values["ratio"] = [own[which] / plain[which] for own, plain in pairs]
    found: dict[str, Any] = {}
    for what, numbers in values.items():
        found[f"{clock}_{what}"] = statistics.median(numbers) if numbers else None
        found[f"{clock}_{what}_quartiles"] = _quartiles(numbers) if numbers else None
    return found


def _quartiles(numbers: list[float]) -> list[float]:
    if len(numbers) == 1:
        return numbers * 2
    low, _, high = statistics.quantiles(numbers, n=4, method="inclusive")
    return [low, high]


def _ratio(values: dict[str, int], name: str) -> float | None:
    baseline = values.get(baseline_of(name))
    return values[name] / baseline if name in values and baseline else None


def environment(options: argparse.Namespace) -> dict[str, Any]:
    """Where and how it was measured."""
    cpu = platform.processor() or platform.machine()
    if (information := Path("/proc/cpuinfo")).exists():
        lines = information.read_text().splitlines()
        cpu = next((x.partition(":")[2].strip() for x in lines if x.startswith("model name")), cpu)
    return {
        "device": torch.cuda.get_device_name() if options.device == "cuda" else "cpu",
        "cpu": cpu,
        "threads": options.threads,
        "torch": torch.__version__,
        "rounds": options.rounds,
        "logical_batch": options.logical_batch,
    }


def _tell(what: str) -> None:
    print(what, file=sys.stderr, flush=True)


# -- what is shown ---------------------------------------------------------------------------------


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The rows as a Markdown table with its notes below."""

    def number(value: float | None, form: str, quartiles: list[float] | None = None) -> str:
        if value is None:
            return "–"
        spread = f" ({quartiles[0]:{form}} to {quartiles[1]:{form}})" if quartiles else ""
        return f"{value:{form}}{spread}"

    lines = [
        "| size | images | method | over | CPU time | wall time | peak memory | FLOPs | CPU s |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        cells = [
            row["size"],
            str(row["microbatch"]),
            f"`{row['method']}`",
            f"`{row['baseline']}`",
            number(row["cpu_ratio"], ".3f", row["cpu_ratio_quartiles"]),
            number(row["wall_ratio"], ".3f", row["wall_ratio_quartiles"]),
            number(row["memory_ratio"], ".2f")
            + (f" ({row['memory_bytes'] / 2**20:,.0f} MiB)" if row["memory_bytes"] else ""),
            number(row["flop_ratio"], ".3f"),
            number(row["cpu_seconds"], ".3f"),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    first = rows[0]
    lines.append(
        f"\nMedians (and quartiles) of {first['rounds']} interleaved rounds, ratios to the step "
        f"named under *over*; {first['threads']} thread(s) of {first['cpu']}, device "
        f"{first['device']}, torch {first['torch']}.\n"
    )
    remarks: dict[str, list[str]] = {}
    for row in rows:
        for remark in filter(None, (row["note"], row["reason"])):
            names = remarks.setdefault(remark, [])
            if f"`{row['method']}`" not in names:
                names.append(f"`{row['method']}`")
    return "\n".join(lines + [f"- {', '.join(names)}: {text}." for text, names in remarks.items()])


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line; ends the program with a sentence about what does not fit."""

    def whole_number(text: str) -> int:
        if not text.isdecimal() or int(text) < 1:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
        return int(text)

    parser = argparse.ArgumentParser(
        description=(__doc__ or "").split("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    names = [name for name in METHODS if not name.startswith("plain_compiled")]
    add("--sizes", nargs="+", choices=list(SIZES), default=["nano", "base"], help="model sizes")
    add("--microbatch", nargs="+", type=whole_number, default=[16], help="images a step")
    add("--methods", nargs="+", choices=list(METHODS), default=names, help="what to compare")
    add("--rounds", type=whole_number, default=7, help="timed rounds")
    add("--logical-batch", type=whole_number, default=64, help="images of a whole_* step")
    add("--per-image-gib", type=float, default=4.0, help="per-image gradients kept at once")
    add("--without", nargs="+", choices=["memory", "flops"], default=[], help="leave out")
    add("--threads", type=whole_number, default=1)
    add("--device", choices=["cpu", "cuda"], default="cpu")
    add("--json", metavar="FILE", help="write the rows there")
    add("--markdown", metavar="FILE", help="write the table there")
    add("--memory-only", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device is cuda, but torch sees no CUDA device here; use --device cpu")
    if not options.per_image_gib > 0:
        parser.error(f"--per-image-gib is {options.per_image_gib}; it must be greater than 0")
    for microbatch in options.microbatch:
        if options.logical_batch % microbatch and any(
            n.startswith("whole") for n in options.methods
        ):
            parser.error(
                f"--logical-batch is {options.logical_batch}, not a multiple of --microbatch "
                f"{microbatch}: a whole step is made of whole microbatches"
            )
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print the table, write the files."""
    options = parse(arguments)
    torch.set_num_threads(options.threads)
    warnings.filterwarnings("ignore", message="There is a performance drop")  # vmap says so itself
    if options.memory_only:
        size, microbatch = options.sizes[0], options.microbatch[0]
        budget = int(options.per_image_gib * 2**30)
        problem = make_problem(size, microbatch, options.device, options.logical_batch, budget)
        print(peak_bytes(options.methods[0], problem))
        return
    rows: list[dict[str, Any]] = []
    for size in options.sizes:
        for microbatch in options.microbatch:
            rows += measure(size, microbatch, options)
            if options.json:
                Path(options.json).write_text(json.dumps(rows, indent=1))
            if options.markdown:
                Path(options.markdown).write_text(table(rows) + "\n")
    print(table(rows))


if __name__ == "__main__":
    main()
