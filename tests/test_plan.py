"""The plan: derived numbers, refusals, and what a manifest's N changes."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.chain.console import plan_lines
from pipeline.plan import PhasePlan, make_mechanism, plan_recipe, solve_recipe
from pipeline.recipe import Recipe, RecipeError, load_recipe

RECIPES = sorted((Path(__file__).parent.parent / "jobs" / "recipes").glob("*.yaml"))
DEMO = next(path for path in RECIPES if path.name == "demo.yaml")


def demo(*overrides: str) -> Recipe:
    # A given noise multiplier needs no calibration, which takes seconds.
    quick = ["phases.private.privacy.noise_multiplier=1.0"]
    return load_recipe(DEMO, [*quick, *overrides])


def private(recipe: Recipe, **num_records: int) -> PhasePlan:
    return plan_recipe(recipe, num_records)[-1]


def test_derived_numbers_of_a_private_phase() -> None:
    plan = private(demo())
    assert plan.mechanism is not None and plan.epsilon and plan.epsilon_without_reserve
    assert plan.mechanism.sampling_probability == 2048 / 60000
    assert plan.mechanism.delta == 1 / 120000
    assert plan.mechanism.reserve_steps == 40 and plan.num_restarts == 2
    assert plan.num_images == 2048 * 150
    assert plan.coverage == pytest.approx(1 - (1 - 2048 / 60000) ** 150)
    assert plan.epsilon_without_reserve.value < plan.epsilon.value < 8
    assert plan.hours(1000) == pytest.approx(307200 / 3.6e6)
    lines = dict(plan_lines(plan, 1000))
    assert lines["noise multiplier"] == "1"
    assert f"{plan.epsilon.value} by PLD" in lines["epsilon, 190 steps"]


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.name)
def test_every_recipe_is_within_its_target(path: Path) -> None:
    """As it stands, with no data prepared."""
    recipe = load_recipe(path)
    for phase, plan in zip(recipe.phases, plan_recipe(recipe), strict=True):
        assert plan.assumed and (plan.epsilon is None) == (phase.kind == "public")
        assert plan.epsilon is None or 7.9 < plan.epsilon.value <= 8
        if path.name == "vip_base_laion.yaml" and plan.mechanism is not None:
            assert plan.mechanism.reserve_steps == 200


def test_the_manifest_rules_over_the_recipe() -> None:
    plan = private(demo(), private=30000)
    assert plan.num_records == 30000
    assert plan.batch_size == 1500, "max_sampling_probability 0.05 lowers B"
    assert plan.mechanism is not None and plan.mechanism.expected_batch_size == 1500
    assert any("lowered from 2048 to 1500" in note for note in plan.notes)


def test_views_cost_memory_and_no_privacy() -> None:
    single, fourfold = private(demo()), private(demo("phases.private.views_per_image=4"))
    assert fourfold.epsilon == single.epsilon and fourfold.mechanism == single.mechanism
    assert fourfold.num_images == single.num_images
    assert fourfold.memory_bytes > 2 * single.memory_bytes


def test_an_assumed_n_is_marked() -> None:
    def shown(plan: PhasePlan) -> str:
        return dict(plan_lines(plan, 1000))["records N"]

    assumed = "60,000 (assumed: the recipe's num_records; not prepared yet)"
    assert shown(private(demo())) == assumed
    assert shown(private(demo(), private=60000)) == "60,000"
    warmup = plan_recipe(demo("data.synthetic.num_records="))[0]
    assert shown(warmup) == "19,000 (assumed: num_images of its source; not prepared yet)"
    broken = demo("data.synthetic.num_records=", "data.synthetic.source=synthetic:dots?size=9")
    with pytest.raises(RecipeError, match=r"data\.synthetic\.source=synthetic:dots.* is unknown"):
        plan_recipe(broken)


def test_a_batch_above_n_is_refused() -> None:
    recipe = demo("phases.private.privacy.max_sampling_probability=")
    with pytest.raises(RecipeError, match="2048 but private has 1000 records"):
        private(recipe, private=1000)


def test_a_plan_over_its_target_tells_the_true_cost() -> None:
    recipe = demo("phases.private.privacy.noise_multiplier=0.5")
    with pytest.raises(RecipeError, match=r"costs epsilon 1\d\.\d+ .* over target_epsilon 8"):
        private(recipe)


def test_unknown_n_is_asked_for() -> None:
    with pytest.raises(RecipeError, match=r"set data\.private\.num_records"):
        plan_recipe(demo("data.private.num_records="))


def test_phases_over_one_domain_share_the_target() -> None:
    """PITFALLS 26: two stages within target each are refused where their sum is not."""
    base = demo("phases.private.privacy.noise_multiplier=0.7")
    second = base.phases[1].model_copy(update={"name": "again"})
    both = base.model_copy(update={"phases": [*base.phases, second]})
    assert private(base).epsilon is not None
    with pytest.raises(RecipeError, match=r"read the same privacy domain demo .* over the target"):
        plan_recipe(both)


@pytest.mark.parametrize("unknown", ["steps", "batch", "noise"])
def test_solved_values_are_what_plan_accepts(unknown: str) -> None:
    """The reserve that follows from the steps, and a cap on q, are in the answer."""
    reserve = "phases.private.checkpoint_interval=1"  # so that 2 % of the steps is the larger
    recipe = demo(reserve)
    ((name, solved),) = solve_recipe(recipe, {}, unknown)
    value, key = {
        "steps": (solved.num_steps, "steps"),
        "batch": (solved.expected_batch_size, "privacy.expected_batch_size"),
        "noise": (solved.noise_multiplier, "privacy.noise_multiplier"),
    }[unknown]
    plan = private(demo(reserve, f"phases.{name}.{key}={value}"))
    assert plan.mechanism == solved
    assert plan.epsilon is not None and plan.epsilon.value <= 8
    if unknown == "batch":
        assert plan.batch_size == 3_000, "max_sampling_probability is 0.05"
    if unknown == "steps":
        assert solved.reserve_steps > make_mechanism(recipe.phases[-1], 60_000).reserve_steps
        with pytest.raises(RecipeError, match="over target_epsilon 8"):
            private(demo(reserve, f"phases.{name}.steps={value + 1}"))


@pytest.mark.parametrize(
    ("steps", "interval", "reserve", "num_restarts"),
    [
        (10, 100, 20, 2),  # an attempt of ten steps loses ten at most
        (150, 100, 300, 2),
        (150, 10, 40, 2),
        (6_000, 50, 200, 2),  # vip_base_laion.yaml
        (6_000, 20, 120, 3),  # 2 % of the steps
        (1, 1, 2, 2),
    ],
)
def test_the_default_reserve_is_what_two_lost_attempts_may_cost(
    steps: int, interval: int, reserve: int, num_restarts: int
) -> None:
    """4 checkpoint intervals, but no attempt loses more than the whole phase."""
    plan = private(
        demo(
            f"phases.private.steps={steps}",
            f"phases.private.checkpoint_interval={interval}",
            "phases.private.optimizer.warmup_steps=0",
            "phases.private.privacy.target_epsilon=",
        )
    )
    assert plan.mechanism is not None and plan.mechanism.reserve_steps == reserve
    assert plan.num_restarts == num_restarts


def test_memory_grows_with_the_microbatch() -> None:
    small, large = private(demo("phases.private.microbatch_size=8")), private(demo())
    assert small.memory_bytes < large.memory_bytes


def test_memory_of_shared_state_and_checkpointed_blocks() -> None:
    def public(*overrides: str) -> int:
        return plan_recipe(demo("model.size=large", *overrides))[0].memory_bytes

    several = "phases.warmup.resources.workers=4"
    whole = public(several, "phases.warmup.resources.shard_optimizer=false")
    saved = whole - public(several)
    assert whole == public() and saved > 4 * 300_000_000
    checkpointed = "phases.warmup.activation_checkpointing=true"
    assert public(checkpointed) < public()
    private_too = private(demo("phases.private.activation_checkpointing=true"))
    assert private_too.memory_bytes < private(demo()).memory_bytes
