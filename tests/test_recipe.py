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
        ("phases.private.batch_size=3", "expected_batch_size"),
        ("phases.private.resources.workers=[3, 2]", "min <= max"),
        ("phases.private.optimizer.base_learning_rate=1", "exactly one of"),
        ("data.private.deduplicate=none", "set it to 'exact'"),
        ("data.private.source=webdataset:s3://KEY:SECRET@bucket/x", "a user and a password"),
        ("ledger_home=ledgers", "ledger_home: is 'ledgers': it must be an absolute path"),
        ("private_storage=s3://bucket/x", "allowed is a local folder"),
        ("phases.private.name=evaluate", "stages of the chain"),
        ("name=Has Spaces", "name: is 'Has Spaces'"),
        ("phases", "path=value"),
        ("phases.private=3", "not the member itself"),
    ],
)
def test_mistakes_are_named(override: str, expected: str) -> None:
    with pytest.raises(RecipeError) as caught:
        demo(override)
    assert expected in str(caught.value)
    assert "SECRET" not in str(caught.value)


def test_missing_file_and_bad_yaml_are_recipe_errors(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="cannot be read"):
        load_recipe(tmp_path / "none.yaml")
    with pytest.raises(RecipeError, match="not valid YAML"):
        parse_recipe("a: [")
    with pytest.raises(RecipeError, match="mapping"):
        parse_recipe("- 1")


def test_digest_is_of_what_decides_the_result() -> None:
    same = demo("storage=/elsewhere", "phases.private.resources.workers=2", "name=other")
    assert same.digest() == demo().digest()
    told = ("evaluation.seed=1", "data.private.num_records=7", "hyperparameter_search=none")
    assert demo(*told, "phases.private.held_out=").digest() == demo().digest()
    assert demo("phases.private.steps=151").digest() != demo().digest()
    assert demo("data.private.source=idx:/b").digest() != demo().digest()


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
