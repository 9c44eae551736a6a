"""Charts and pictures of a report, each one a data URI that needs no other file."""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import matplotlib
import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from PIL import Image

from pipeline.report.facts import BASELINES, PhaseFacts, PrivacyFacts

INK, MUTED, GRID = "#1e293b", "#64748b", "#e2e8f0"
BLUE, ORANGE, TEAL, VIOLET = "#1d4ed8", "#c2410c", "#0f766e", "#6d28d9"

_STYLE: Any = {
    "axes.edgecolor": MUTED,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.labelcolor": INK,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlecolor": INK,
    "axes.titlelocation": "left",
    "axes.titlesize": 10.5,
    "axes.titleweight": "bold",
    "axes.titlepad": 10,
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "grid.color": GRID,
    "grid.linewidth": 0.8,
    "legend.frameon": False,
    "lines.linewidth": 2,
    "lines.solid_capstyle": "round",
    "savefig.facecolor": "white",
    "svg.fonttype": "path",
    "svg.hashsalt": "dp-pretrain",
    "text.color": INK,
    "xtick.color": MUTED,
    "xtick.labelcolor": INK,
    "ytick.color": MUTED,
    "ytick.labelcolor": INK,
}


def privacy_chart(phases: Sequence[PhaseFacts], privacy: Sequence[PrivacyFacts]) -> str:
    """Epsilon against private steps, phases one after the other, with the target as a line."""
    steps, epsilons, starts = [0], [0.0], []
    done = 0
    for phase in phases:
        if phase.kind != "private":
            continue
        starts.append((done, phase.name))
        for point in phase.points:
            if point.epsilon is not None:
                steps.append(done + point.step)
                epsilons.append(point.epsilon)
        done += phase.num_steps
    with _figure(10.4, 3.2) as (figure, save):
        axes = figure.subplots()
        axes.fill_between(steps, epsilons, color=VIOLET, alpha=0.10, linewidth=0)
        axes.plot(steps, epsilons, color=VIOLET, marker="o", markersize=3.5)
        axes.annotate(
            f"{epsilons[-1]:.10g}",
            (steps[-1], epsilons[-1]),
            xytext=(6, 0),
            textcoords="offset points",
            va="center",
            color=VIOLET,
            weight="bold",
        )
        targets = {p.target_epsilon for p in privacy if p.target_epsilon is not None}
        for target in targets:
            axes.axhline(target, color=MUTED, linestyle=(0, (4, 3)), linewidth=1.2)
            axes.annotate(
                f"target {target:g}",
                (0, target),
                xytext=(4, 4),
                textcoords="offset points",
                color=MUTED,
            )
        for start, name in starts[1:]:
            axes.axvline(start, color=MUTED, linewidth=1)
            axes.annotate(name, (start, 0), xytext=(4, 4), textcoords="offset points")
        axes.set(xlabel="private steps", ylabel="epsilon", xlim=(0, max(done, 1)))
        axes.set_ylim(0, 1.15 * max([*epsilons, *targets, 1e-9]))
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        return save()


def loss_chart(phase: PhaseFacts, norm_pix_loss: bool) -> str:
    """Public losses of one phase against its steps."""
    with _figure(3.5, 2.75) as (figure, save):
        axes = figure.subplots()
        axes.set_title(f"public loss (norm_pix_loss {'on' if norm_pix_loss else 'off'})")
        _line(axes, phase, "held_out_loss", BLUE, label="held out")
        _line(axes, phase, "train_loss", ORANGE, label="training")
        if axes.lines:
            axes.legend(loc="upper right")
        else:
            axes.text(0.5, 0.5, "no public loss", transform=axes.transAxes, ha="center")
            axes.set_yticks([])
        return save()


def rate_chart(phase: PhaseFacts) -> str:
    """Learning rate of one phase against its steps."""
    peak = max((point.learning_rate for point in phase.points), default=0.0)
    power = math.floor(math.log10(peak)) if peak > 0 else 0
    with _figure(3.5, 2.75) as (figure, save):
        axes = figure.subplots()
        axes.set_title(f"learning rate, in $\\mathbf{{10^{{{power}}}}}$")
        _line(axes, phase, "learning_rate", TEAL, scale=10.0**-power)
        _from_zero(axes)
        return save()


def speed_chart(phase: PhaseFacts) -> str:
    """Throughput of one phase against its steps."""
    with _figure(3.5, 2.75) as (figure, save):
        axes = figure.subplots()
        axes.set_title("images per second")
        _line(axes, phase, "images_per_second", INK)
        _from_zero(axes)
        return save()


def probe_chart(probes: Sequence[Mapping[str, Any]]) -> str:
    """Accuracies with intervals, one line per model and rule, baselines grey."""
    has_few = any(entry["few_shot"] for entry in probes)
    with _figure(9.2, 0.9 + 0.42 * len(probes)) as (figure, save):
        axes = figure.subplots()
        for row, entry in enumerate(probes):
            colour = MUTED if entry["model"] in BASELINES else BLUE
            _interval(
                axes,
                row - (0.14 if has_few else 0),
                entry["linear_probe"],
                colour=colour,
                marker="o",
            )
            if entry["few_shot"]:
                _interval(
                    axes, row + 0.14, entry["few_shot"], colour=colour, marker="D", face="white"
                )
        axes.set_yticks(range(len(probes)), [f"{p['model']}\n{p['rule']}" for p in probes])
        axes.set_ylim(len(probes) - 0.5, -0.5)
        axes.grid(axis="y", visible=False)
        axes.set_xlabel("accuracy, %")
        axes.margins(x=0.08)
        axes.plot([], [], color=INK, marker="o", linewidth=1.4, label="linear probe")
        if has_few:
            few = next(p["few_shot"] for p in probes if p["few_shot"])
            axes.plot(
                [],
                [],
                color=INK,
                marker="D",
                markersize=5,
                markerfacecolor="white",
                linewidth=1.4,
                label=f"{few['shots']} images per class",
            )
        axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=2)
        return save()


def picture_strip(
    parts: Sequence[npt.NDArray[np.uint8]], *, height: int = 112, gap: int = 6
) -> str:
    """Pictures [H, W, 3] of one size side by side on white; small ones are enlarged whole-fold."""
    fold = max(1, height // parts[0].shape[0])
    enlarged = [np.repeat(np.repeat(part, fold, axis=0), fold, axis=1) for part in parts]
    space = np.full((enlarged[0].shape[0], gap, 3), 255, np.uint8)
    row = [block for part in enlarged for block in (space, part)][1:]
    stream = io.BytesIO()
    Image.fromarray(np.concatenate(row, axis=1)).save(stream, "PNG", optimize=True)
    return _data_uri("image/png", stream.getvalue())


@contextmanager
def _figure(width: float, height: float) -> Iterator[tuple[Figure, Callable[[], str]]]:
    """A figure in the house style and the function that turns it into a data URI."""
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(width, height), layout="constrained")

        def save() -> str:
            stream = io.BytesIO()
            figure.savefig(stream, format="svg", metadata={"Date": None, "Creator": None})
            return _data_uri("image/svg+xml", stream.getvalue())

        yield figure, save


def _line(
    axes: Axes, phase: PhaseFacts, field: str, colour: str, *, label: str = "", scale: float = 1.0
) -> None:
    """One metric against the step, where it is known; dots where points are few."""
    known = [point for point in phase.points if getattr(point, field) is not None]
    if known:
        steps = [point.step for point in known]
        values = [scale * getattr(point, field) for point in known]
        marker = "o" if len(known) <= 40 else ""
        axes.plot(steps, values, color=colour, label=label, marker=marker, markersize=3.2)
    axes.set_xlabel("step")
    axes.set_xlim(0, 1.02 * max(phase.num_steps, 1))
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))


def _from_zero(axes: Axes) -> None:
    """Start the vertical axis at zero and leave room above the highest value."""
    axes.set_ylim(0, 1.12 * axes.dataLim.y1 if axes.lines else 1)


def _interval(
    axes: Axes,
    row: float,
    result: Mapping[str, Any],
    *,
    colour: str,
    marker: str,
    face: str | None = None,
) -> None:
    centre = 100 * result["accuracy"]
    low, high = (100 * end for end in result["interval"] or (result["accuracy"],) * 2)
    axes.plot([low, high], [row, row], color=colour, linewidth=1.6)
    axes.plot(centre, row, color=colour, marker=marker, markersize=5.5, mfc=face or colour)
    axes.annotate(
        f"{centre:.1f}",
        (high, row),
        xytext=(5, 0),
        textcoords="offset points",
        va="center",
        fontsize=8,
        color=colour,
    )


def _data_uri(kind: str, content: bytes) -> str:
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"
