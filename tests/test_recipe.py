"""Recipes: strict, readable errors, overrides by name, a digest of what decides the result."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from pipeline.recipe import Recipe, RecipeError, load_recipe, parse_recipe

RECIPES = sorted((Path(__file__).parent.parent / "jobs" / "recipes").glob("*.yaml"))
DEMO = next(path for path in RECIPES if path.name == "demo.yaml")


def demo(*overrides: str) -> Recipe:
    return load_recipe(DEMO, overrides)


@pytest.mark.parametrize("path", RECIPES, ids=lambda p: p.name)
def test_every_recipe_loads_and_survives_a_round_trip(path: Path) -> None:
    recipe = load_recipe(path)
    assert parse_recipe(recipe.to_yaml()) == recipe


def test_override_addresses_list_members_by_name() -> None:
    recipe = demo("phases.private.privacy.target_epsilon=2", "data.private.source=imagefolder:/a b")
    privacy = recipe.phase("private").privacy
    assert privacy is not None and privacy.target_epsilon == 2
    assert recipe.data["private"].source == "imagefolder:/a b"


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("phases.private.lr=1", "phases.private.lr: unknown key"),
        ("phases.privat.steps=1", "known: ['warmup', 'private']"),
        ("phases.private.steps=0", "phases.private.steps: is 0"),
        ("phases.private.steps=many", "phases.private.steps: is 'many'"),
        ("phases.private.data=nothing", "no such data set"),
        ("phases.warmup.data=private", "a public phase"),
        ("phases.warmup.held_out=private", "a private set"),
        ("evaluation.test=private", "a private set"),
        ("seed=1", "a seeded run has no guarantee"),
        ("model.patch_size=9", "must divide image_size"),
        ("data.private.domain=", "needs a domain"),
        ("data.benchmark.domain=x", "a public one has none"),
        ("data.benchmark.splits={probe: 0.5}", "must add up to 1"),
        ("phases.private.privacy.target_epsilon=.nan", "phases.private.privacy.target_epsilon"),
        ("phases.private.privacy.adjacency=add_or_remove_one", "use 'replace_special'"),
        ("phases.private.privacy.clipping=hard", "clipping: is 'hard'"),
        ("phases.private.privacy.clipping_style=per-head", "clipping_style: is 'per-head'"),
        ("phases.private.views_per_image=0", "views_per_image: is 0"),
        ("phases.warmup.views_per_image=true", "true and false are not allowed"),
        ("phases.private.batch_size=3", "expected_batch_size"),
        ("phases.private.resources.workers=[3, 2]", "min <= max"),
        ("phases.private.optimizer.base_learning_rate=1", "exactly one of"),
        ("data.private.deduplicate=none", "set it to 'exact'"),
        ("data.private.source=webdataset:s3://KEY:SECRET@bucket/x", "a user and a password"),
        (
            "data.private.source=webdataset:http://x",
            "is 'webdataset:http://x': allowed are a local",
        ),
        ("storage=http://x", "storage: is 'http://x': allowed are a local path, s3://"),
        ("ledger_home=ledgers", "ledger_home: is 'ledgers': it must be an absolute path"),
        ("private_storage=s3://bucket/x", "allowed is a local folder"),
        ("phases.private.name=evaluate", "stages of the chain"),
        ("name=Has Spaces", "name: is 'Has Spaces'"),
        ("phases", "path=value"),
        ("=3", "path=value"),
        ("name=2020-13-45", "the value is not valid YAML"),
        ("data.benchmark.budget={epsilon: 1, delta: 1.0e-5}", "for a public data set"),
        ("data.private.budget={epsilon: 0, delta: 1.0e-5}", "budget.epsilon: is 0"),
        ("phases..steps=3", "path=value"),
        ("phases.private.resources.workers=-1", "workers: is -1: allowed are 0"),
        ("phases.private.steps=1000000000", "less than or equal to 1000000"),
        ("phases.private.privacy.reserve_steps=1000000000", "less than or equal to 1000000"),
        ("phases.private.privacy.noise_multiplier=1e-30", "greater than or equal to 0.01"),
        ("phases.private.privacy.delta=0.9", "less than or equal to 0.1"),
        ("data.private.splits={a/b: 1.0}", "splits.a/b: is 'a/b': allowed are lower-case"),
        ("phases.private=3", "not the member itself"),
    ],
)
def test_mistakes_are_named(override: str, expected: str) -> None:
    with pytest.raises(RecipeError) as caught:
        demo(override)
    assert expected in str(caught.value)
    assert "SECRET" not in str(caught.value)


def test_values_are_what_was_typed() -> None:
    """YAML takes ` #…` for a comment and `a: b` for a mapping; a path may hold either."""
    for path in ("idx:/my photos #1/x", "idx:/a: b", "imagefolder:/ü #%20?x=1&y", "x:y"):
        assert demo(f"data.private.source={path}").data["private"].source == path
    assert demo("data.private.source='idx:/quoted #2'").data["private"].source == "idx:/quoted #2"
    for override in ("phases.private.steps=true", "phases.private.checkpoint_interval=no"):
        with pytest.raises(RecipeError, match="true and false are not allowed here"):
            demo(override)


def test_a_new_source_drops_the_old_ones_origin() -> None:
    """A statement must not say of somebody's photos that they are Fashion-MNIST."""
    notes: list[str] = []
    source, own = "data.private.source=imagefolder:/my/photos", "data.private.origin=my photos"
    recipe = load_recipe(DEMO, [source], notes.append)
    assert recipe.data["private"].origin == "" and recipe.data["benchmark"].origin
    (note,) = notes
    assert note.startswith("data.private.origin ('Fashion-MNIST, 60,000 training images') tells of")
    for overrides in ([source, own], [own, source]):
        assert load_recipe(DEMO, overrides, notes.append).data["private"].origin == "my photos"
    assert load_recipe(DEMO, ["data.private.num_records=7"], notes.append).data["private"].origin
    assert len(notes) == 1


def test_missing_file_and_bad_yaml_are_recipe_errors(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="cannot be read"):
        load_recipe(tmp_path / "none.yaml")
    with pytest.raises(RecipeError, match="not valid YAML"):
        parse_recipe("a: [")
    with pytest.raises(RecipeError, match="mapping"):
        parse_recipe("- 1")


def test_digest_is_of_what_decides_the_result() -> None:
    machines = ("workers=2", "cache_dir=/nvme", "cache_bytes=1048576", "prefetch_units=9")
    same = demo(
        "storage=/elsewhere", "name=other", *(f"phases.private.resources.{m}" for m in machines)
    )
    assert same.digest() == demo().digest()
    told = ("evaluation.seed=1", "data.private.num_records=7", "hyperparameter_search=none")
    assert demo(*told, "phases.private.held_out=").digest() == demo().digest()
    how = ("phases.private.activation_checkpointing=true", "phases.private.microbatch_size=8")
    assert demo(*how).digest() == demo().digest()
    assert demo("phases.private.steps=151").digest() != demo().digest()
    for decides in ("privacy.clipping=global", "privacy.clipping_style=per-block"):
        assert demo(f"phases.private.{decides}").digest() != demo().digest()
    assert demo("phases.private.views_per_image=4").digest() != demo().digest()
    assert demo("data.private.source=idx:/b").digest() != demo().digest()


def test_compiling_and_checkpointing_do_not_go_together() -> None:
    compiled = "phases.private.resources.compile=true"
    assert demo(compiled).digest() == demo().digest()
    with pytest.raises(RecipeError, match=r"resources\.compile and activation_checkpointing"):
        demo(compiled, "phases.private.activation_checkpointing=true")


def test_unknown_keys_are_refused_at_every_depth() -> None:
    content = yaml.safe_load(DEMO.read_text())
    paths = [(), ("model",), ("data", "private"), ("evaluation",)]
    for path in paths:
        broken = yaml.safe_load(DEMO.read_text())
        node = broken
        for key in path:
            node = node[key]
        node["typo"] = 1
        with pytest.raises(RecipeError, match="typo: unknown key"):
            parse_recipe(yaml.safe_dump(broken))
    assert "typo" not in content


def test_a_key_that_stands_twice_is_refused() -> None:
    text = DEMO.read_text()
    with pytest.raises(RecipeError, match="'name' stands twice"):
        parse_recipe(text + "\nname: other\n")
    nested = text.replace("target_epsilon: 8", "target_epsilon: 8\n      target_epsilon: 80")
    assert nested != text
    with pytest.raises(RecipeError, match="'target_epsilon' stands twice"):
        parse_recipe(nested)


def test_an_override_changes_one_place_only() -> None:
    """YAML aliases make two places one object; `--set` means the place that it names."""
    optimizer = "optimizer: {learning_rate: 1.0e-3}"
    text = f"""
name: twins
data: {{public: {{source: "synthetic:textures?num_images=9&size=16", visibility: public}}}}
phases:
  - {{name: a, kind: public, data: public, steps: 3, batch_size: 2, {optimizer}}}
  - {{name: b, kind: public, data: public, steps: 3, batch_size: 2, {optimizer}}}
"""
    shared = text.replace(optimizer, optimizer.replace("{", "&shared {"), 1)
    shared = shared[: shared.rindex("optimizer")] + "optimizer: *shared}\n"
    assert parse_recipe(shared) == parse_recipe(text)
    changed = parse_recipe(shared, ["phases.a.optimizer.learning_rate=0.5"])
    rates = [phase.optimizer.learning_rate for phase in changed.phases]
    assert rates == [0.5, 1.0e-3]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "this is empty"),
        ("3", "this is a number or text"),
        ("a: " + "[" * 5000, "nested too deeply"),
    ],
)
def test_what_is_no_mapping_is_refused(text: str, message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        parse_recipe(text)
