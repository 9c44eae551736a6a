"""A run as one self-contained HTML page: no script, no style sheet, font or picture elsewhere."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined, select_autoescape
from markdown_it import MarkdownIt
from markupsafe import Markup

from pipeline.report.facts import (
    BASELINES,
    DIFFERENTIAL_PRIVACY,
    PUBLIC_DATA_ONLY,
    PhaseFacts,
    PrivacyFacts,
    ReportInputs,
    best_probe,
    trained_probes,
)
from pipeline.report.figures import (
    loss_chart,
    picture_strip,
    privacy_chart,
    probe_chart,
    rate_chart,
    speed_chart,
)
from pipeline.storage import Location

MAX_PICTURES = 12


def render_report(inputs: ReportInputs, destination: Location) -> Location:
    """Write the page.

    Args:
        inputs: What to show; public facts only.
        destination: The file to write, such as `.../report.html`.
    Returns:
        The same location.

    Guarantees:
        1. The page asks for nothing outside itself
           (test_the_page_asks_for_nothing_outside_itself).
        2. Whatever text the inputs hold is shown as text, never run (test_text_stays_text).
        3. Equal inputs give equal pages (test_equal_inputs_give_equal_pages).
    """
    destination.write_text(render_html(inputs))
    return destination


def render_html(inputs: ReportInputs) -> str:
    """The page as a string."""
    environment = Environment(
        loader=PackageLoader("pipeline", "report"),
        autoescape=select_autoescape(["html"]),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "epsilon": _epsilon,
        "number": _number,
        "short": _short,
        "switch": _switch,
        "percent": _percent,
        "interval": _interval,
        "two_digits": _two_digits,
        "duration": _duration,
    }
    evaluation = inputs.evaluation
    is_spent = inputs.is_private and any(phase.kind == "private" for phase in inputs.phases)
    return environment.get_template("report.html").render(
        inputs=inputs,
        warning=_warning(inputs),
        headlines=_headlines(inputs),
        privacy_chart=privacy_chart(inputs.phases, inputs.privacy) if is_spent else None,
        phases=[(phase, _charts(phase, inputs.model.norm_pix_loss)) for phase in inputs.phases],
        pictures=_pictures(inputs),
        evaluation=evaluation,
        baselines=BASELINES,
        probe_chart=probe_chart(evaluation["probes"]) if evaluation else None,
        rules=_rule_descriptions(evaluation),
        few_shot=_first_few_shot(evaluation),
        statement=_markdown(inputs.statement_markdown),
    )


@dataclass(frozen=True, kw_only=True)
class _Headline:
    name: str
    value: str
    note: str


def _headlines(inputs: ReportInputs) -> list[_Headline]:
    """Epsilon, delta, N and the best probe, each with what is needed to read it."""
    shown = [_epsilon_headline(inputs)]
    if inputs.privacy and inputs.is_private:
        worst = _costliest(inputs.privacy)
        shown.append(
            _Headline(
                name="Delta",
                value=_short(worst.delta),
                note="additive slack of the guarantee" + _slack_note(worst),
            )
        )
        shown.append(
            _Headline(
                name="Private records",
                value="private" if worst.num_records is None else _number(worst.num_records),
                note=f"protected: {worst.unit}",
            )
        )
    else:
        shown.append(_Headline(name="Private records", value="0", note="no private image was read"))
    probe = best_probe(trained_probes(inputs.evaluation))
    if probe is not None:
        result = probe["linear_probe"]
        shown.append(
            _Headline(
                name="Linear probe",
                value=_percent(result["accuracy"]),
                note=f"95 % interval {_interval(result['interval'])}, {probe['rule']}, "
                f"{_number(result['num_test'])} images; {_baseline_note(inputs.evaluation)}",
            )
        )
    else:
        shown.append(_Headline(name="Linear probe", value="—", note="nothing was evaluated"))
    return shown


def _epsilon_headline(inputs: ReportInputs) -> _Headline:
    if not inputs.privacy:
        return _Headline(name="Epsilon", value="—", note="no private phase, nothing to spend")
    worst = _costliest(inputs.privacy)
    if not inputs.is_private or worst.epsilon is None:
        return _Headline(name="Epsilon", value="none", note="NOT PRIVATE: there is no guarantee")
    note = f"of this model, by {worst.accountant}"
    if worst.target_epsilon is not None:
        note += f"; the run may reach {worst.target_epsilon:g}"
    return _Headline(name="Epsilon", value=_epsilon(worst.epsilon), note=note)


def _slack_note(privacy: PrivacyFacts) -> str:
    """Delta measured against N, where N is public."""
    if privacy.num_records is None:
        return ""
    return f"; delta × N = {privacy.delta * privacy.num_records:.3g}"


def _costliest(privacy: Sequence[PrivacyFacts]) -> PrivacyFacts:
    """The domain that paid most; one without a bound comes first."""
    return max(privacy, key=lambda p: float("inf") if p.epsilon is None else p.epsilon)


def _baseline_note(evaluation: Mapping[str, Any] | None) -> str:
    """The best baseline, so that the headline cannot be read without it."""
    assert evaluation is not None
    baselines = [p for p in evaluation["probes"] if p["model"] in BASELINES]
    best = best_probe(baselines)
    if best is None:
        return "no baseline"
    return f"best baseline: {best['model']} {_percent(best['linear_probe']['accuracy'])}"


def _warning(inputs: ReportInputs) -> str | None:
    """What must be read before anything else, or None."""
    if inputs.guarantee not in (DIFFERENTIAL_PRIVACY, PUBLIC_DATA_ONLY):
        return (
            f"{inputs.guarantee}: these weights carry no privacy guarantee. Do not release them as "
            f"private."
        )
    unbounded = [p.domain for p in inputs.privacy if p.domain_epsilon is None]
    if unbounded:
        return (
            f"The total over the privacy domain {', '.join(unbounded)} is unbounded: its records "
            f"were also read without protection, as its ledger records."
        )
    return None


def _charts(phase: PhaseFacts, norm_pix_loss: bool) -> list[tuple[str, str]]:
    """Charts of a phase, each with what it shows in words."""
    losses = []
    for field, name in (("held_out_loss", "held-out"), ("train_loss", "training")):
        known = [getattr(p, field) for p in phase.points if getattr(p, field) is not None]
        if known:
            losses.append(f"{name} loss from {known[0]:.4g} to {known[-1]:.4g}")
    peak = max((point.learning_rate for point in phase.points), default=0.0)
    name = f"Phase {phase.name}, {phase.num_steps} steps"
    charts = [
        (loss_chart(phase, norm_pix_loss), f"{name}: {' and '.join(losses) or 'no public loss'}."),
        (rate_chart(phase), f"{name}: learning rate, at most {_short(peak)}."),
    ]
    if phase.kind == "public":
        speed = phase.images_per_second
        spoken = "unknown" if speed is None else f"median {_two_digits(speed)}"
        charts.append((speed_chart(phase), f"{name}: images per second, {spoken}."))
    return charts


def _pictures(inputs: ReportInputs) -> list[tuple[str, str]]:
    """One strip (original, masked, reconstructed) per public image, with its alternative text."""
    pictures = inputs.pictures
    if pictures is None:
        return []
    strips = zip(pictures.original, pictures.masked, pictures.reconstructed, strict=True)
    hidden = f"{100 * inputs.model.mask_ratio:.0f} % of the patches hidden"
    return [
        (
            picture_strip(strip),
            f"Public image {number}: original; with {hidden}; filled in by the model",
        )
        for number, strip in enumerate(list(strips)[:MAX_PICTURES], start=1)
    ]


def _first_few_shot(evaluation: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    probes = evaluation["probes"] if evaluation else []
    return next((p["few_shot"] for p in probes if p["few_shot"]), None)


def _markdown(text: str) -> Markup:
    """Markdown as HTML below a section heading: raw HTML is escaped, headings move two levels."""
    reader = MarkdownIt("commonmark", {"html": False}).enable("table")
    # A page that asks for nothing outside itself has no pictures from elsewhere and no links.
    reader.disable(["image", "link", "autolink"])
    tokens = reader.parse(text)
    if tokens and tokens[0].tag == "h1":
        tokens = tokens[3:]  # the section has this title already
    for token in tokens:
        if token.type in ("heading_open", "heading_close"):
            token.tag = f"h{min(6, int(token.tag[1]) + 1)}"
    return Markup(reader.renderer.render(tokens, reader.options, {}))


def _rule_descriptions(evaluation: Mapping[str, Any] | None) -> dict[str, str]:
    """What each feature rule means, for those whose name does not say it."""
    probes = evaluation["probes"] if evaluation else []
    described = {p["rule"]: p["rule_description"] for p in probes}
    return {rule: text for rule, text in described.items() if rule != text}


def _switch(loss: Mapping[str, Any]) -> str:
    """Whether norm_pix_loss was on, and with which floor of the variance."""
    return f"on ({loss['norm_pix_epsilon']:g})" if loss["norm_pix_loss"] else "off"


def _epsilon(value: float | None) -> str:
    """As the statement has it, already rounded up; rounding again could understate it."""
    return "no bound" if value is None else f"{value:.10g}"


def _number(value: float) -> str:
    return f"{value:,}"


def _short(value: float) -> str:
    """Four significant digits; powers of ten with a real minus and multiplication sign."""
    text = f"{value:.4g}"
    if "e" not in text:
        return text
    mantissa, exponent = text.split("e")
    raised = str(int(exponent)).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))
    return f"{mantissa} × 10{raised}"


def _two_digits(value: float) -> str:
    return f"{float(f'{value:.2g}'):,.6g}"


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _interval(interval: Sequence[float] | None) -> str:
    if interval is None:
        return "one draw"
    low, high = (100 * end for end in interval)
    return f"{low:.1f} – {high:.1f}"


def _duration(phase: PhaseFacts) -> str:
    """Time that the images seen take at the median speed."""
    if not phase.images_per_second:
        return "—"
    seconds = phase.num_images_seen / phase.images_per_second
    for unit, length in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.2g} {unit}"
    return f"{seconds:.2g} s"
