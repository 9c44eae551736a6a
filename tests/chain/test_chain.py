"""The chain by its command line: a whole small run, its resume, its refusals, its kill."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import timm
import torch
from phase_fixtures import write_images
from small_recipe import dp_pretrain, write_small_recipe

from pipeline.chain.results import clipping_in_words
from pipeline.privacy.accountant import epsilon_of
from pipeline.privacy.composition import epsilon_of_charges, worst_cases
from pipeline.privacy.ledger import BudgetExceeded, Ledger
from pipeline.recipe import load_recipe
from pipeline.storage import Location

ROOT = Path(__file__).parents[2]


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    """A recipe of seconds: synthetic warm-up, private phase, probe."""
    return write_small_recipe(tmp_path)


def test_clipping_in_words() -> None:
    phase = load_recipe(ROOT / "jobs" / "recipes" / "demo.yaml").phase("private")
    for clipping, style, num_views in (("global", "per-layer", 1), ("flat", "per-block", 4)):
        assert phase.privacy is not None
        told = {"clipping": clipping, "clipping_style": style}
        privacy = phase.privacy.model_copy(update=told)
        views = phase.model_copy(update={"views_per_image": num_views})
        words = clipping_in_words(views, privacy)
        assert f"({clipping})" in words and f"({style})" in words
        assert "square root of the number of" in words
        assert ("of its mean loss over 4 views" in words) == (num_views == 4)


def test_a_whole_run_and_its_second_call(recipe: Path, tmp_path: Path) -> None:
    code, output = dp_pretrain("run", recipe)
    assert code == 0, output
    run = tmp_path / "storage" / "runs" / "small"
    html = (run / "report.html").read_text()
    assert html.startswith("<!") and str(tmp_path) not in html, "the report tells no place"
    for part in ("epsilon", "linear probe", "raw pixels", "Report:", str(run / "report.html")):
        assert part in output

    encoder = timm.create_model(f"local-dir:{run / 'export'}", pretrained=True).eval()
    assert encoder(torch.zeros(1, 3, 16, 16)).shape == (1, 16)
    (statement,) = json.loads((run / "export" / "privacy.json").read_text())["statements"]
    assert statement["is_private"]
    mechanism = statement["phases"][0]["mechanism"]
    assert mechanism["num_records"] >= 190 and mechanism["expected_batch_size"] == 20
    assert statement["phases"][0]["num_charged_steps"] == 8
    assert statement["phases"][0]["clipping"] == (
        "an image's gradient is scaled to almost the clip (automatic, gamma 0.01), over all "
        "parameters at once (all-layer)"
    )
    assert 0 < statement["epsilon"]["this_model"]["value"] <= 8
    ledger = Ledger(str(tmp_path / "storage" / "domains"), "small-domain")
    ledger.verify(weights_digest=statement["weights_sha256"])

    entries = len(ledger.entries())
    code, output = dp_pretrain("run", recipe)
    assert code == 0 and "complete" in output
    assert len(ledger.entries()) == entries
    code, output = dp_pretrain("status", "small", "--storage", tmp_path / "storage")
    assert code == 0 and "done (complete), step 8 of 8; 8 steps charged" in output

    code, output = dp_pretrain("run", recipe, "--set", "evaluation.seed=1")
    assert code == 0 and "warmup: done" in output and "seed 1" in output
    assert {account.num_charged_steps for account in ledger.verify().phases} == {8}

    code, output = dp_pretrain("run", recipe, "--set", "phases.private.steps=4")
    assert code == 0 and "this run is called 'small-2'" in output
    report = ledger.verify()
    assert {account.run for account in report.phases} == {"small", "small-2"}


def test_the_minimal_recipe_runs(tmp_path: Path) -> None:
    """What a reader copies, with a smaller model: its defaults are enough for a whole run."""
    photos = write_images(tmp_path / "photos", seed=5, num_images=200)
    changes = {
        "storage": tmp_path / "storage",
        "data.synthetic.source": "synthetic:textures?num_images=64&size=16",
        "data.photos.source": photos,
        "data.photos.num_records": 200,
        "model": "{size: micro, image_size: 16, patch_size: 4}",
    }
    for phase, batch in (("warmup", "batch_size"), ("private", "privacy.expected_batch_size")):
        of = f"phases.{phase}"
        changes |= {f"{of}.steps": 3, f"{of}.{batch}": 16, f"{of}.optimizer.warmup_steps": 1}
        changes |= {f"{of}.microbatch_size": 16, f"{of}.resources.device": "cpu"}
    words = [word for key, value in changes.items() for word in ("--set", f"{key}={value}")]
    code, output = dp_pretrain("run", ROOT / "jobs" / "recipes" / "minimal.yaml", *words)
    assert code == 0 and "the recipe names no evaluation" in output, output
    assert (tmp_path / "storage" / "runs" / "minimal" / "report.html").exists()


SLOW = ["--set", "phases.private.steps=40", "--set", "phases.private.checkpoint_interval=4"]


def interrupted(recipe: Path, tmp_path: Path, number: signal.Signals) -> tuple[int, str]:
    """Runs the driver, ends it in its private phase; its exit code and what it printed."""
    command = [sys.executable, "-m", "pipeline.cli", "run", str(recipe), *SLOW]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    printed = tmp_path / "printed"
    with open(printed, "wb") as file:
        process = subprocess.Popen(command, stdout=file, stderr=file, env=environment)
    checkpoints = tmp_path / "storage" / "runs" / "small" / "phases" / "private"
    deadline = time.monotonic() + 120
    while not list(checkpoints.glob("checkpoint-*8/checkpoint.json")):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(number)
    return process.wait(60), printed.read_text()


def test_sigterm_ends_in_order(recipe: Path, tmp_path: Path) -> None:
    code, printed = interrupted(recipe, tmp_path, signal.SIGTERM)
    assert code == 143
    assert "Ended by SIGTERM: the same command resumes" in printed and "Traceback" not in printed


def test_kill_of_the_driver_then_the_same_command(recipe: Path, tmp_path: Path) -> None:
    """Nothing is lost but the reservation, which stays charged."""
    assert interrupted(recipe, tmp_path, signal.SIGKILL)[0] == -signal.SIGKILL
    ledger = Ledger(str(tmp_path / "storage" / "domains"), "small-domain")
    charged = sum(steps for _, steps in ledger.spent_by("small"))
    assert 8 <= charged < 40

    code, output = dp_pretrain("run", recipe, *SLOW)
    assert code == 0, output
    (account,) = ledger.verify().phases
    assert account.finished == "complete"
    assert len(account.attempts) == 2
    assert 40 <= account.num_charged_steps <= 48
    assert account.num_charged_steps >= charged + 40 - account.attempts[1].first_step


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("phases.private.stepz=3", "unknown key"),
        ("data.private.source=imagefolder:/nowhere/at/all", "/nowhere/at/all"),
        ("phases.private.privacy.expected_batch_size=500", "has 200 records"),
        ("phases.private.privacy.noise_multiplier=0.3", "over target_epsilon 8"),
        ("storage=/proc/nothing", "cannot be written"),
        ("model.size=enormous", "enormous"),
        ("phases.private.resources.device=cuda", "no CUDA"),
    ],
)
def test_mistakes_get_a_sentence(recipe: Path, override: str, message: str) -> None:
    code, output = dp_pretrain("run", recipe, "--set", override)
    assert code == 1
    assert message in output and "Traceback" not in output


@pytest.mark.parametrize(
    ("override", "field", "message"),
    [
        ("storage=foo://bucket/x", "storage: is 'foo://bucket/x'", "allowed are a local path"),
        ("ledger_home=/proc/nothing", "ledger_home is '/proc/nothing'", "cannot write"),
        ("private_storage=/proc/nothing", "private_storage is '/proc/nothing'", "cannot be"),
        ("phases.private.init=/nowhere", "phases.private.init is '/nowhere'", "no finished"),
        ("data.private.source=imagefolder:", "data.private.source='imagefolder:'", "KIND"),
        ("data.private.source=photos:/x", "data.private.source='photos:/x'", "KIND"),
        ("data.private.source=imagefolder:/etc/hosts", "data.private.source=", "is a file"),
        ("data.private.source=webdataset:/no/x", "data.private.source=", "does not exist"),
    ],
)
def test_wrong_places_are_refused_before_anything_is_made(
    recipe: Path, tmp_path: Path, override: str, field: str, message: str
) -> None:
    code, output = dp_pretrain("run", recipe, "--set", override)
    assert code == 1 and field in output and message in output and "Traceback" not in output
    storage = tmp_path / "storage"
    assert not storage.exists() or not list(storage.iterdir())


@pytest.mark.parametrize("name", ["runs", "data", "domains", "private"])
def test_a_file_where_a_folder_belongs_is_named(recipe: Path, tmp_path: Path, name: str) -> None:
    (tmp_path / "storage").mkdir()
    (tmp_path / "storage" / name).write_text("a file")
    code, output = dp_pretrain("run", recipe)
    assert code == 1 and f"{tmp_path}/storage/{name}" in output and "move it away" in output


def test_beginning_with_weights_of_another_ledger_is_refused(recipe: Path, tmp_path: Path) -> None:
    """Before anything is trained: no statement could be made about what comes of them."""
    assert dp_pretrain("run", recipe)[0] == 0
    final = tmp_path / "storage" / "runs" / "small" / "phases" / "private" / "checkpoint-00000008"
    elsewhere = ["--set", f"storage={tmp_path}/other", "--set", f"phases.warmup.init={final}"]
    code, output = dp_pretrain("run", recipe, *elsewhere)
    assert code == 1 and "knows nothing of it: set ledger_home" in output
    assert not (tmp_path / "other" / "data").exists()
    here = ["--set", "name=more", "--set", f"phases.warmup.init={final}"]
    code, output = dp_pretrain("run", recipe, *here)
    assert code == 0, output


def test_unlabelled_evaluation_is_refused_before_anything_is_trained(
    recipe: Path, tmp_path: Path
) -> None:
    labels = tmp_path / "public" / "some-labels-idx1-ubyte"
    labels.rename(tmp_path / "labels")
    code, output = dp_pretrain("run", recipe)
    assert code == 1 and "has no labelled image" in output
    (tmp_path / "labels").rename(labels)
    few = ["--set", "evaluation.shots=60", "--set", "data.benchmark.origin=labelled"]
    code, output = dp_pretrain("run", recipe, *few)
    assert code == 1 and "shots is 60" in output
    assert not list((tmp_path / "storage").rglob("checkpoint.json"))
    assert not Ledger(str(tmp_path / "storage" / "domains"), "small-domain").entries()


def test_a_changed_source_is_told(recipe: Path, tmp_path: Path) -> None:
    assert dp_pretrain("prepare", recipe)[0] == 0
    code, output = dp_pretrain("prepare", recipe)
    assert code == 0 and "withdrawn" not in output
    with open(tmp_path / "private" / "some-labels-idx1-ubyte", "ab") as file:
        file.write(b"more")
    code, output = dp_pretrain("prepare", recipe)
    assert code == 0 and "data.private.source" in output
    assert "pictures withdrawn since are still in it, new ones are not" in output
    (tmp_path / "private").rename(tmp_path / "archived")
    code, output = dp_pretrain("prepare", recipe)
    assert code == 0 and "withdrawn" not in output, "the prepared copy is enough"


def test_a_damaged_run_recipe_is_named(recipe: Path, tmp_path: Path) -> None:
    saved = tmp_path / "storage" / "runs" / "small" / "recipe.yaml"
    saved.parent.mkdir(parents=True)
    saved.write_bytes(b"\xff\xfe name: [")
    for words in (["run", recipe], ["status", "small", "--storage", tmp_path / "storage"]):
        code, output = dp_pretrain(*words)
        assert code == 1 and str(saved) in output and "restore it" in output


def test_empty_folder_is_named(recipe: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    code, output = dp_pretrain(
        "run", recipe, "--set", f"data.private.source=imagefolder:{tmp_path}/empty"
    )
    assert code == 1 and "empty" in output and "Traceback" not in output


def test_a_lost_run_folder_does_not_live_on_its_reserve(recipe: Path, tmp_path: Path) -> None:
    from pipeline.chain.layout import claim_run
    from pipeline.recipe import load_recipe

    assert dp_pretrain("run", recipe)[0] == 0
    run = tmp_path / "storage" / "runs" / "small"
    run.rename(tmp_path / "gone")
    layout, note = claim_run(load_recipe(recipe))
    assert layout.recipe.name == "small-2" and note is not None


def test_plan_of_the_paper() -> None:
    recipes = ROOT / "jobs" / "recipes"
    laion = recipes / "vip_base_laion.yaml"
    code, output = dp_pretrain("plan", laion, "--set", "phases.private.privacy.reserve_steps=0")
    assert code == 0
    assert "PLD: noise multiplier 0.4566; RDP: 0.4800" in output
    command = ["phases.private.privacy.noise_multiplier=0.5"]
    command += ["phases.private.privacy.reserve_steps=0"]
    words = [word for override in command for word in ("--set", override)]
    code, output = dp_pretrain("plan", recipes / "vip_base_imagenet.yaml", *words)
    assert code == 1
    assert "costs epsilon 45" in output and "over target_epsilon 8" in output


def test_who_read_without_protection_is_shown_as_a_person(tmp_path: Path) -> None:
    home = tmp_path / "domains"
    Ledger(str(home), "photos").record_unprotected("me", "outside dp-pretrain", "a look at them")
    code, output = dp_pretrain("privacy", "show", "photos", "--ledger-home", home)
    assert code == 0
    assert "read without protection: by me, outside dp-pretrain: a look at them" in output


def test_budget_is_kept_to(recipe: Path, tmp_path: Path) -> None:
    """Over all runs of the domain, with or without a budget in their recipe, before training."""
    budget = "data.private.budget={epsilon: 7, delta: 0.0025}"
    ledger = Ledger(str(tmp_path / "storage" / "domains"), "small-domain")
    low = budget.replace("7", "3")
    code, output = dp_pretrain("plan", recipe, "--set", low)
    assert code == 1 and "budget of epsilon 3.0" in output and not ledger.entries()
    code, output = dp_pretrain("run", recipe, "--set", low)
    assert code == 1 and "budget of epsilon 3.0" in output and "0.0 is spent" in output
    assert not list((tmp_path / "storage").rglob("checkpoint.json")) and not ledger.spent()
    code, output = dp_pretrain("run", recipe, "--set", budget)
    assert code == 0, output
    assert dp_pretrain("run", recipe, "--set", budget)[0] == 0, "a finished run spends no more"
    code, output = dp_pretrain("run", recipe, "--set", "name=second")
    assert code == 1 and "budget of epsilon 7.0" in output and "raise data.NAME.budget" in output
    code, output = dp_pretrain("plan", recipe, "--set", "name=second")
    assert code == 1 and "budget of epsilon 7.0" in output, "the ledger knows it, not the recipe"
    assert {account.run for account in ledger.accounts()} == {"small"}
    raised = budget.replace("7", "30")
    code, output = dp_pretrain("run", recipe, "--set", "name=second", "--set", raised)
    assert code == 0 and "was epsilon 7.0 at delta 0.0025; by this recipe it is now" in output
    kinds = [entry.body["epsilon"] for entry in ledger.entries() if entry.kind == "budget"]
    assert kinds == [7.0, 30.0], "a run that is refused leaves no budget behind"
    spent = epsilon_of_charges(ledger.charges(), 0.0025).value
    _, output = dp_pretrain("privacy", "show", "second", "--storage", tmp_path / "storage")
    assert f"budget: epsilon 30.0 at delta 0.0025; spent at this delta: {spent}" in output


def test_runs_over_disjoint_splits_do_not_add_up(recipe: Path, tmp_path: Path) -> None:
    """A record lies in one of them; after the splits were made anew, who knows."""
    splits = ["--set", "data.private.splits={one: 0.5, other: 0.5}"]
    ledger = Ledger(str(tmp_path / "storage" / "domains"), "small-domain")

    def total(name: str, split: str) -> float:
        chosen = ["--set", f"name={name}", "--set", f"phases.private.data=private.{split}"]
        batch = ["--set", "phases.private.privacy.expected_batch_size=10"]
        code, output = dp_pretrain("run", recipe, *splits, *chosen, *batch)
        assert code == 0, output
        folder = tmp_path / "storage" / "runs" / name / "export"
        (statement,) = json.loads((folder / "privacy.json").read_text())["statements"]
        report = ledger.verify()
        assert report.epsilon is not None
        assert dp_pretrain("privacy", "verify", name, "--storage", tmp_path / "storage")[0] == 0
        assert statement["epsilon"]["domain"]["value"] >= statement["epsilon"]["this_run"]["value"]
        return report.epsilon.value

    first, second = total("a", "one"), total("b", "other")
    cost = [epsilon_of(case, 1e-3).value for case in worst_cases(ledger.charges())]
    everything = epsilon_of(ledger.spent(), 1e-3).value
    assert len(cost) == 2 and max(cost) < everything
    assert max(first, second) < first + 2, "not the sum"
    assert total("c", "one") > second + 1, "the same split again adds up"
    before = ledger.verify().epsilon
    (folder,) = (tmp_path / "storage" / "data").glob("private-*")
    shutil.rmtree(folder)
    assert before is not None and total("d", "other") > before.value + 1


def test_budget_holds_where_preparing_is_skipped(recipe: Path, tmp_path: Path) -> None:
    """A cluster's chain does not prepare again: the phase itself must see a new budget."""
    from pipeline.chain.layout import RunLayout
    from pipeline.chain.stages import train_stage
    from pipeline.chain.terminal import make_console
    from pipeline.recipe import load_recipe

    assert dp_pretrain("prepare", recipe)[0] == 0
    layout = RunLayout(load_recipe(recipe, ["data.private.budget={epsilon: 3, delta: 0.0025}"]))
    train_stage(layout, "warmup", make_console())
    with pytest.raises(BudgetExceeded, match=r"budget of epsilon 3\.0"):
        train_stage(layout, "private", make_console())


def test_what_only_plans_does_not_prepare_again(recipe: Path) -> None:
    from pipeline.chain.layout import RunLayout
    from pipeline.recipe import load_recipe

    def folder(*overrides: str) -> str:
        return str(RunLayout(load_recipe(recipe, overrides)).dataset("private"))

    only_planned = ("data.private.num_records=7", "data.private.budget={epsilon: 9, delta: 0.001}")
    assert {folder(each) for each in only_planned} == {folder()}
    assert folder("data.private.image_short_side=20") != folder()


def test_storage_that_cannot_be_read_is_named(
    recipe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for words in (["status", "small"], ["privacy", "show", "small"]):
        code, output = dp_pretrain(*words, "--storage", "http://x")
        assert code == 2 and "'--storage': is 'http://x': allowed are a local path" in output

    def unreachable(place: Location) -> bool:
        raise OSError("Couldn't resolve host name")

    monkeypatch.setattr(Location, "exists", unreachable)
    code, output = dp_pretrain("plan", recipe, "--set", "storage=s3://bucket/x")
    assert code == 1 and "storage is 's3://bucket/x' and cannot be read: Couldn't" in output


def test_solve_for_steps_and_batch(recipe: Path) -> None:
    noise = ["--set", "phases.private.privacy.noise_multiplier=1.0"]
    code, output = dp_pretrain("plan", recipe, "--solve", "steps", *noise)
    assert code == 0 and "phase private: steps " in output and "cost epsilon 7.9" in output
    code, output = dp_pretrain("plan", recipe, "--solve", "batch", *noise)
    assert code == 0 and "expected batch" in output and "(8 reserve steps included)" in output
    code, output = dp_pretrain("plan", recipe, "--solve", "batch")
    assert code == 1 and "give target_epsilon and noise_multiplier" in output
    code, output = dp_pretrain("plan", recipe, "--solve", "noise")
    assert code == 0 and "cost epsilon 7.9" in output
