"""The plan of a run: every derived number, before any machine is asked for.

`plan_recipe` turns a recipe (and the manifests' N, where data is prepared) into one PhasePlan a
phase. A private phase's Mechanism is made here and nowhere else; a plan over its target is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import floor
from typing import Literal

from pipeline.data.sources import SyntheticSource, open_source
from pipeline.models.sizes import model_size, num_parameters
from pipeline.privacy.accountant import Epsilon, calibrate_noise_multiplier, epsilon_of
from pipeline.privacy.composition import WHOLE, Charge, epsilon_of_charges
from pipeline.privacy.mechanism import Mechanism, default_delta, default_reserve_steps
from pipeline.privacy.sampling import expected_coverage
from pipeline.privacy.solve import calibrate_batch_size, calibrate_num_steps
from pipeline.recipe import Phase, Recipe, RecipeError


@dataclass(frozen=True, kw_only=True)
class PhasePlan:
    """The derived numbers of one phase; `mechanism` and what follows it: private phases only.

    Args:
        num_records: N.
        assumed: where N is from while the data is not prepared; "" if it is the manifest's.
        batch_size: B, images in a logical batch (expected, if private).
        learning_rate: the schedule's peak.
        num_images: images seen, B x steps.
        coverage: expected share of records seen at least once.
        memory_bytes: rough peak memory of one microbatch, weights and optimizer included.
        epsilon: of num_steps + reserve_steps.
        epsilon_without_reserve: of num_steps alone.
        num_restarts: worst-case restarts (2K steps each, at most T) that the reserve affords.
        calibrated: noise multipliers that meet the target by each accountant alone.
        notes: what a person should know about these numbers.
    """

    name: str
    kind: str
    num_records: int
    batch_size: int
    num_steps: int
    learning_rate: float
    num_images: int
    coverage: float
    memory_bytes: int
    assumed: str = ""
    mechanism: Mechanism | None = None
    epsilon: Epsilon | None = None
    epsilon_without_reserve: Epsilon | None = None
    num_restarts: int | None = None
    calibrated: dict[str, float] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def hours(self, images_per_second: float) -> float:
        """Hours of training at this rate."""
        return self.num_images / images_per_second / 3600


def plan_recipe(
    recipe: Recipe, num_records: Mapping[str, int] | None = None, *, compare: bool = False
) -> list[PhasePlan]:
    """The plan of each phase, in order.

    Args:
        num_records: N by data reference, from manifests; these rule over the recipe's own.
        compare: also calibrate by each accountant alone, to show what one gains over the other.

    Raises:
        RecipeError: for a phase whose N is unknown, whose batch is larger than N, or whose privacy
            cost is over the target; the true cost is in the message.
    """
    known = dict(num_records or {})
    plans = [_plan_phase(recipe, phase, known.get(phase.data), compare) for phase in recipe.phases]
    _refuse_joint_overrun(recipe, plans)
    return plans


def make_mechanism(phase: Phase, num_records: int) -> Mechanism:
    """The Mechanism of a private phase over N records; calibrated where the recipe asks for it."""
    privacy = phase.privacy
    assert privacy is not None
    batch_size = logical_batch_size(phase, num_records)
    reserve = privacy.reserve_steps
    if reserve is None:
        reserve = default_reserve_steps(phase.steps, phase.checkpoint_interval)
    draft = Mechanism(
        num_records=num_records,
        expected_batch_size=batch_size,
        sampling_probability=batch_size / num_records,
        noise_multiplier=privacy.noise_multiplier or 1.0,
        max_grad_norm=privacy.max_grad_norm,
        num_steps=phase.steps,
        reserve_steps=reserve,
        delta=privacy.delta or default_delta(num_records),
        adjacency=privacy.adjacency,
    )
    if privacy.noise_multiplier is not None:
        return draft
    assert privacy.target_epsilon is not None
    noise_multiplier = calibrate_noise_multiplier(draft, target_epsilon=privacy.target_epsilon)
    return replace(draft, noise_multiplier=noise_multiplier)


def solve_recipe(
    recipe: Recipe, num_records: Mapping[str, int], unknown: str
) -> list[tuple[str, Mechanism]]:
    """What the target_epsilon of each private phase allows: steps, batch, or noise.

    Args:
        unknown: "steps" or "batch" (the most, at the recipe's noise_multiplier) or "noise" (the
            least); what the recipe says of it is ignored.

    Returns:
        (phase, its mechanism with that value), in order; exactly what `plan_recipe` makes of a
        recipe in which the value is set (test_solved_values_are_what_plan_accepts).

    Raises:
        RecipeError: for a private phase that does not give what the search needs.
    """
    solved = []
    for phase in recipe.phases:
        privacy = phase.privacy
        if privacy is None:
            continue
        target = privacy.target_epsilon
        if target is None or (privacy.noise_multiplier is None and unknown != "noise"):
            needed = "target_epsilon" + ("" if unknown == "noise" else " and noise_multiplier")
            raise RecipeError(
                f"phases.{phase.name}.privacy: to solve for {unknown}, give {needed} (as in --set)"
            )
        known = num_records.get(phase.data) or _assumed_num_records(recipe, phase)[0]
        solved.append((phase.name, make_mechanism(_solved(phase, known, target, unknown), known)))
    return solved


def _solved(phase: Phase, num_records: int, target_epsilon: float, unknown: str) -> Phase:
    """The phase with the value that was looked for."""
    privacy = phase.privacy
    assert privacy is not None
    if unknown == "noise":
        calibrated = privacy.model_copy(update={"noise_multiplier": None})
        return phase.model_copy(update={"privacy": calibrated})
    mechanism = make_mechanism(phase, num_records)
    if unknown == "steps":

        def reserve_of(num_steps: int) -> int:
            if privacy.reserve_steps is not None:
                return privacy.reserve_steps
            return default_reserve_steps(num_steps, phase.checkpoint_interval)

        made = calibrate_num_steps(mechanism, target_epsilon=target_epsilon, reserve_of=reserve_of)
        return phase.model_copy(update={"steps": made.num_steps})
    made = calibrate_batch_size(mechanism, target_epsilon=target_epsilon)
    larger = privacy.model_copy(update={"expected_batch_size": made.expected_batch_size})
    return phase.model_copy(update={"privacy": larger})


def _plan_phase(
    recipe: Recipe, phase: Phase, from_manifest: int | None, compare: bool
) -> PhasePlan:
    num_records, assumed = from_manifest, ""
    if num_records is None:
        num_records, assumed = _assumed_num_records(recipe, phase)
    batch_size = logical_batch_size(phase, num_records)
    if batch_size > num_records:
        key = "privacy.expected_batch_size" if phase.privacy else "batch_size"
        raise RecipeError(
            f"phases.{phase.name}.{key} is {batch_size} but {phase.data} has {num_records} "
            f"records: it must be at most N; lower it"
            + (", or set privacy.max_sampling_probability" if phase.privacy else "")
        )
    q = batch_size / num_records
    plan = PhasePlan(
        name=phase.name,
        kind=phase.kind,
        num_records=num_records,
        batch_size=batch_size,
        num_steps=phase.steps,
        learning_rate=phase.optimizer.peak_learning_rate(batch_size),
        num_images=batch_size * phase.steps,
        coverage=expected_coverage(q, phase.steps) if phase.privacy else min(1.0, q * phase.steps),
        memory_bytes=memory_bytes(recipe, phase),
        assumed=assumed,
    )
    return _with_privacy(plan, phase, compare) if phase.privacy else plan


def _with_privacy(plan: PhasePlan, phase: Phase, compare: bool) -> PhasePlan:
    privacy = phase.privacy
    assert privacy is not None
    mechanism = make_mechanism(phase, plan.num_records)
    total = mechanism.max_charged_steps
    epsilon = epsilon_of([(mechanism, total)], mechanism.delta)
    target = privacy.target_epsilon
    if target is not None and epsilon.value > target:
        raise RecipeError(
            f"phases.{phase.name}: this plan costs epsilon {epsilon.value} ({epsilon.accountant}; "
            f"PLD {epsilon.pld}, RDP {epsilon.rdp}) at delta {mechanism.delta:.3g} for {total} "
            f"steps (reserve included), over target_epsilon {target}: remove noise_multiplier to "
            "have it calibrated, or lower steps or expected_batch_size"
        )
    calibrated: dict[str, float] = {}
    if compare and target is not None:
        accountants: tuple[Literal["pld", "rdp"], ...] = ("pld", "rdp")
        calibrated = {
            accountant: calibrate_noise_multiplier(
                mechanism, target_epsilon=target, accountant=accountant
            )
            for accountant in accountants
        }
    notes = []
    if plan.batch_size < privacy.expected_batch_size:
        notes.append(
            f"expected_batch_size lowered from {privacy.expected_batch_size} to {plan.batch_size}: "
            f"max_sampling_probability is {privacy.max_sampling_probability}"
        )
    if mechanism.delta > 1e-4:
        notes.append(
            f"delta {mechanism.delta:.2g} is large, because N is small: a guarantee with it says "
            "little about one of so few records"
        )
    if epsilon.value > 20:
        notes.append(f"epsilon {epsilon.value} gives next to no protection")
    return replace(
        plan,
        mechanism=mechanism,
        epsilon=epsilon,
        epsilon_without_reserve=epsilon_of([(mechanism, mechanism.num_steps)], mechanism.delta),
        num_restarts=mechanism.reserve_steps // min(2 * phase.checkpoint_interval, phase.steps),
        calibrated=calibrated,
        notes=tuple(notes),
    )


def _refuse_joint_overrun(recipe: Recipe, plans: list[PhasePlan]) -> None:
    """Private phases over one domain compose: their total is held to the strictest target."""
    domains: dict[str, list[tuple[PhasePlan, Charge]]] = {}
    for phase, plan in zip(recipe.phases, plans, strict=True):
        if plan.mechanism is not None:
            domain = recipe.dataset_of(phase.data, "data").domain or phase.data
            name, _, split = phase.data.partition(".")
            part = f"{name}/{split}" if split else WHOLE
            charge = Charge(plan.mechanism, plan.mechanism.max_charged_steps, part)
            domains.setdefault(domain, []).append((plan, charge))
    for domain, paired in domains.items():
        if len(paired) < 2:
            continue
        members, charges = [plan for plan, _ in paired], [charge for _, charge in paired]
        delta = min(charge.mechanism.delta for charge in charges)
        total = epsilon_of_charges(charges, delta)
        privacies = [recipe.phase(plan.name).privacy for plan in members]
        targets = [p.target_epsilon for p in privacies if p is not None and p.target_epsilon]
        if targets and total.value > min(targets):
            raise RecipeError(
                f"phases {[plan.name for plan in members]} read the same privacy domain {domain} "
                f"and cost epsilon {total.value} together at delta {delta:.3g}, over the target "
                f"{min(targets)}: a target bounds the whole run; give them noise_multiplier values "
                "that fit together"
            )


def declared_num_records(recipe: Recipe, reference: str) -> tuple[int, str] | None:
    """N to plan with while data is not prepared, and where it is from; None if nothing says it.

    Prepared data may hold less: duplicates, overlap with public sets and what cannot be read are
    left out, and a split's share is drawn by hash.

    Raises:
        RecipeError: for a synthetic source that is not understood.
    """
    name, _, split = reference.partition(".")
    dataset = recipe.data[name]
    num_records, origin = dataset.num_records, "the recipe's num_records"
    if num_records is None:
        if not dataset.source.startswith("synthetic:"):
            return None
        try:
            source = open_source(dataset.source)
        except ValueError as error:
            raise RecipeError(f"data.{name}.{error}") from None
        assert isinstance(source, SyntheticSource)
        num_records, origin = source.num_images, "num_images of its source"
    share = dataset.splits[split] if dataset.splits else 1.0
    return floor(num_records * share), origin


def _assumed_num_records(recipe: Recipe, phase: Phase) -> tuple[int, str]:
    declared = declared_num_records(recipe, phase.data)
    if declared is None:
        name = phase.data.partition(".")[0]
        raise RecipeError(
            f"phases.{phase.name}: the number of records of {phase.data!r} is not known before "
            f"`dp-pretrain prepare`; to plan now, set data.{name}.num_records"
        )
    return declared


def logical_batch_size(phase: Phase, num_records: int) -> int:
    """B of a phase: as the recipe says, lowered where max_sampling_probability asks for it."""
    if phase.privacy is None:
        assert phase.batch_size is not None
        return phase.batch_size
    wanted, cap = phase.privacy.expected_batch_size, phase.privacy.max_sampling_probability
    return wanted if cap is None else max(1, min(wanted, floor(num_records * cap)))


def memory_bytes(recipe: Recipe, phase: Phase) -> int:
    """Rough peak memory of one rank's microbatch: state of the weights plus activations.

    Assumption: fp32 weights, gradient sum, two optimizer moments and one reduction buffer (20 bytes
    a parameter; moments and buffer divided by the workers that share them), and 34 bytes a token
    and unit of width in each block (activations kept for the backward with fused attention). A
    checkpointed phase keeps 4 bytes of each block and all of one.
    """
    model = recipe.model
    size = model_size(model.size)
    patches = (model.image_size // model.patch_size) ** 2
    visible = int(patches * (1 - model.mask_ratio)) + 1
    encoder, decoder = visible * size.width, (patches + 1) * size.decoder_width
    pixels = 3 * model.image_size**2 * 8
    half = 0.5 if phase.precision == "bfloat16" else 1.0
    num_rows = phase.microbatch_size * phase.views_per_image
    block = 34 * 2 * half
    kept = block * (size.depth * encoder + size.decoder_depth * decoder)
    if phase.activation_checkpointing:
        inputs = 4 * (size.depth * encoder + size.decoder_depth * decoder)
        kept = min(kept, inputs + block * max(encoder, decoder))
    activations = int(num_rows * (kept + pixels))
    count = num_parameters(size, model.image_size, model.patch_size)
    workers = phase.resources.workers
    sharing = max(1, workers if isinstance(workers, int) else workers[0])
    if not phase.resources.shard_optimizer:
        sharing = 1
    return 8 * count + 12 * count // sharing + activations
