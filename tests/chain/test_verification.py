"""`dp-pretrain privacy show|verify`: a good run holds, a tampered one does not."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from small_recipe import dp_pretrain, write_small_recipe

from pipeline.chain.descent import Descent
from pipeline.chain.results import NO_LINEAGE_TEXT
from pipeline.privacy.accountant import epsilon_of
from pipeline.privacy.keys import AttemptKey
from pipeline.privacy.ledger import Ledger
from pipeline.privacy.ledger.signing import KEY_FILE_VARIABLE
from pipeline.privacy.mechanism import Mechanism
from pipeline.privacy.statement import statement_text
from pipeline.recipe import parse_recipe


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The storage of a finished run, to be copied."""
    folder = tmp_path_factory.mktemp("finished")
    code, output = dp_pretrain("run", write_small_recipe(folder))
    assert code == 0, output
    return folder / "storage"


@pytest.fixture
def storage(finished: Path) -> Path:
    """The storage of the run as it was, at its own place (its ledger home is absolute)."""
    kept = finished.with_name("kept")
    if not kept.exists():
        shutil.copytree(finished, kept)
    shutil.rmtree(finished)
    shutil.copytree(kept, finished)
    return finished


def verify(storage: Path) -> tuple[int, str]:
    return dp_pretrain("privacy", "verify", "small", "--storage", storage)


def test_a_good_run_is_verified(storage: Path) -> None:
    code, output = verify(storage)
    assert code == 0 and output.rstrip().endswith("verified"), output
    for part in (
        "ledger of domain 'small-domain'",
        "private, checkpoint-00000008: digests hold; the ledger names its weights",
        "warmup, checkpoint-00000006: digests hold\n",
        "not signed",
        "the statement is what its entries gave up to entry",
        "model.safetensors, config.json, PRIVACY.md, README.md are what the last checkpoint",
        "not checked: report.html",
    ):
        assert part in output


def test_a_run_whose_ledger_was_cut_off_does_not_go_on(storage: Path) -> None:
    cut_tail(storage)
    for command in ("run", "prepare"):
        code, output = dp_pretrain(command, storage.parent / "small.yaml")
        assert code == 1 and "its tail was cut off" in output


DAMAGE: dict[str, Callable[[Path], None]] = {
    "deleted": Path.unlink,
    "cut in half": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "of another kind": lambda path: path.write_text("[]"),
}
RESULTS = ["config.json", "model.safetensors", "README.md", "PRIVACY.md", "privacy.json"]


@pytest.mark.parametrize("name", [*(f"export/{name}" for name in RESULTS), "evaluation.json"])
@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_results_are_made_anew(storage: Path, name: str, damage: str) -> None:
    """The same command writes them again; where only the content tells, verify says what to do."""
    path = storage / RUN / name
    before = path.read_bytes()
    DAMAGE[damage](path)
    code, output = verify(storage)
    assert "Traceback" not in output and (code == 0 or "run again" in output)
    if code == 1 and "delete" in output:
        shutil.rmtree(storage / RUN / "export")
    code, output = dp_pretrain("run", storage.parent / "small.yaml")
    assert code == 0, output
    assert verify(storage)[0] == 0
    if path.suffix == ".safetensors":
        assert path.read_bytes() == before


def test_lost_results_and_checkpoints_do_not_train_again(storage: Path) -> None:
    last = storage / RUN / "phases" / "private" / "checkpoint-00000008"
    shutil.rmtree(last)
    code, output = dp_pretrain("run", storage.parent / "small.yaml")
    assert code == 0 and "complete" in output, "what people need is there"
    shutil.rmtree(storage / RUN / "export")
    entries = len(Ledger(str(storage / "domains"), "small-domain").entries())
    code, output = dp_pretrain("run", storage.parent / "small.yaml")
    assert code == 1 and "restore one or the other" in output
    assert len(Ledger(str(storage / "domains"), "small-domain").entries()) == entries
    (storage / RUN / "report.html").unlink()
    code, output = dp_pretrain("run", storage.parent / "small.yaml")
    assert code == 0, output
    assert verify(storage)[0] == 0


def test_another_run_over_the_domain_changes_nothing(storage: Path) -> None:
    recipe = storage.parent / "small.yaml"
    assert dp_pretrain("run", recipe, "--set", "name=other")[0] == 0
    code, output = verify(storage)
    assert code == 0, output


def edit(path: Path, old: bytes, new: bytes) -> None:
    content = path.read_bytes()
    assert old in content
    path.write_bytes(content.replace(old, new))


def entry(storage: Path, index: int) -> Path:
    return storage / "domains" / "small-domain" / f"{index:08d}.json"


def cut_tail(storage: Path) -> None:
    last = sorted((storage / "domains" / "small-domain").glob("*.json"))[-3:]
    for path in last:
        path.unlink()


def change_weights(path: Path) -> None:
    tensors = load_file(path)
    name = next(name for name, tensor in tensors.items() if tensor.dtype == torch.float32)
    tensors[name] = tensors[name] + 1e-3
    save_file(tensors, path, metadata={"format": "pt"})


def other_weights_with_their_statement(storage: Path) -> None:
    """Weights of one's own under a statement that names them: no entry does."""
    export = storage / "runs" / "small" / "export"
    before = hashlib.sha256((export / "model.safetensors").read_bytes()).hexdigest()
    change_weights(export / "model.safetensors")
    after = hashlib.sha256((export / "model.safetensors").read_bytes()).hexdigest()
    edit(export / "privacy.json", before.encode(), after.encode())


def embellish(storage: Path) -> None:
    marker = storage / "runs" / "small" / "export" / "privacy.json"
    content = json.loads(marker.read_text())
    content["statements"][0]["epsilon"]["this_model"]["value"] = 0.5
    marker.write_text(json.dumps(content))


RUN = Path("runs") / "small"


def cut_tail_of_an_unexported_run(storage: Path) -> None:
    """Only the head that a checkpoint keeps can tell."""
    shutil.rmtree(storage / RUN / "export")
    cut_tail(storage)


def checkpoint_of_ones_own(storage: Path) -> None:
    """Other weights under a checkpoint whose digests fit them: no entry names them."""
    shutil.rmtree(storage / RUN / "export")
    folder = storage / RUN / "phases" / "private" / "checkpoint-00000008"
    before = hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()
    change_weights(folder / "model.safetensors")
    after = hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()
    edit(folder / "checkpoint.json", before.encode(), after.encode())


TAMPERED: dict[str, tuple[Callable[[Path], None], str]] = {
    "entry edited": (
        lambda s: edit(entry(s, 1), b'"num_steps":2', b'"num_steps":1'),
        "ledger entry 1 was altered",
    ),
    "entry removed": (lambda s: entry(s, 2).unlink(), "lacks entry 2"),
    "tail cut off": (cut_tail, "its tail was cut off or rewritten"),
    "tail cut off, not exported": (cut_tail_of_an_unexported_run, "its tail was cut off"),
    "checkpoint of one's own": (checkpoint_of_ones_own, "does not name the weights"),
    "weights changed": (
        lambda s: change_weights(s / RUN / "export" / "model.safetensors"),
        "the weights were changed",
    ),
    "checkpoint changed": (
        lambda s: change_weights(
            s / RUN / "phases" / "private" / "checkpoint-00000008" / "model.safetensors"
        ),
        "differs from the digest",
    ),
    "weights that no entry names": (other_weights_with_their_statement, "names weights"),
    "statement embellished": (embellish, "says otherwise than the ledger in epsilon"),
    "text embellished": (
        lambda s: edit(s / RUN / "export" / "PRIVACY.md", b"(epsilon", b"(tiny epsilon"),
        "PRIVACY.md is not what",
    ),
    "head taken out of a checkpoint": (
        lambda s: edit(
            s / RUN / "phases" / "private" / "checkpoint-00000008" / "checkpoint.json",
            b'"ledger_head": [',
            b'"ledger_head": null, "x": [',
        ),
        "is damaged",
    ),
}


@pytest.mark.parametrize("how", TAMPERED)
def test_tampered_runs_are_refused(storage: Path, how: str) -> None:
    tamper, message = TAMPERED[how]
    tamper(storage)
    code, output = verify(storage)
    assert code == 1 and message in output and "verified\n" not in output, output
    assert "Traceback" not in output


def change_checkpoint(storage: Path, **changes: object) -> None:
    """Other facts in a checkpoint whose files are left as they are."""
    path = storage / RUN / "phases" / "private" / "checkpoint-00000008" / "checkpoint.json"
    content = json.loads(path.read_text())
    content["facts"].update(changes)
    path.write_text(json.dumps(content))


def take_statement_away(storage: Path) -> None:
    export = storage / RUN / "export"
    (export / "privacy.json").write_text(json.dumps({"statements": []}))
    (export / "PRIVACY.md").write_text(NO_LINEAGE_TEXT)


def make_it_public(storage: Path) -> None:
    """As if no private phase had been: in the checkpoints, the statement and its text."""
    take_statement_away(storage)
    kept = sorted((storage / RUN / "phases" / "private").glob("checkpoint-*"))
    for folder in kept[:-1]:
        shutil.rmtree(folder)
    change_checkpoint(storage, lineage=[], ledger_head=None, mechanism_digest=None)


def state_fewer_steps(storage: Path) -> None:
    """A statement and its text, of two steps: each fits the other and the ledger's charges."""
    export = storage / RUN / "export"
    content = json.loads((export / "privacy.json").read_text())
    (statement,) = content["statements"]
    (phase,) = statement["phases"]
    phase["num_steps"] = 2
    cost = epsilon_of([(Mechanism.from_json(phase["mechanism"]), 2)], statement["delta"])
    statement["epsilon"]["this_model"] = cost.to_json()
    (export / "privacy.json").write_text(json.dumps(content))
    (export / "PRIVACY.md").write_text(statement_text(statement))


def claim_fewer_steps(storage: Path) -> None:
    """The same, and in the checkpoint too."""
    state_fewer_steps(storage)
    own = {"domain": "small-domain", "run": "small", "phase": "private", "num_steps": 2}
    change_checkpoint(storage, lineage=[own], step=2)


def call_it_a_public_phase(storage: Path) -> None:
    """In the recipe that the run began with; its digest then fits no checkpoint."""
    path = storage / RUN / "recipe.yaml"
    content = yaml.safe_load(path.read_text())
    content["phases"][1].update(kind="public", privacy=None, batch_size=20, data="synthetic")
    path.write_text(yaml.safe_dump(content))
    make_it_public(storage)


def call_it_public_everywhere(storage: Path) -> None:
    """In every file but the ledger's."""
    call_it_a_public_phase(storage)
    digest = parse_recipe((storage / RUN / "recipe.yaml").read_text(), origin="").digest()
    for path in (storage / RUN / "phases").glob("*/*/checkpoint.json"):
        content = json.loads(path.read_text())
        content["facts"]["recipe_digest"] = digest
        path.write_text(json.dumps(content))


def state_a_smaller_domain(storage: Path) -> None:
    export = storage / RUN / "export"
    content = json.loads((export / "privacy.json").read_text())
    content["statements"][0]["epsilon"]["domain"]["value"] = 0.5
    (export / "privacy.json").write_text(json.dumps(content))
    (export / "PRIVACY.md").write_text(statement_text(content["statements"][0]))


UNDERSTATED: dict[str, tuple[Callable[[Path], None], str]] = {
    "statement taken away": (take_statement_away, "descend from private phases over"),
    "statement lost": (lambda s: (s / RUN / "export" / "privacy.json").unlink(), "nothing is"),
    "made public": (make_it_public, "or what they started from, were made by"),
    "made public but for the head": (
        lambda s: change_checkpoint(s, lineage=[]),
        "or what they started from, were made by",
    ),
    "called a public phase": (call_it_a_public_phase, "under another recipe"),
    "called public everywhere": (call_it_public_everywhere, "started from, were made by"),
    "a smaller domain stated": (state_a_smaller_domain, "otherwise than the ledger in epsilon"),
    "fewer steps stated": (state_fewer_steps, "says otherwise than the ledger in epsilon, phases"),
    "fewer steps claimed": (claim_fewer_steps, "or what they started from, were made by"),
}


@pytest.mark.parametrize("how", UNDERSTATED)
def test_understated_runs_are_refused(storage: Path, how: str) -> None:
    understate, message = UNDERSTATED[how]
    understate(storage)
    code, output = verify(storage)
    assert code == 1 and message in output and "verified\n" not in output, output
    assert "Traceback" not in output


def edit_config(path: Path) -> None:
    edit(path / "config.json", b'"guarantee": "differential privacy"', b'"guarantee": "pure"')


EDITED: dict[str, Callable[[Path], None]] = {
    "config.json": edit_config,
    "README.md": lambda export: edit(export / "README.md", b"Protected:", b"Fully protected:"),
    "PRIVACY.md": lambda export: edit(export / "PRIVACY.md", b"NOT part", b"part"),
}


@pytest.mark.parametrize("name", EDITED)
def test_edited_exports_are_refused(storage: Path, name: str) -> None:
    EDITED[name](storage / RUN / "export")
    code, output = verify(storage)
    assert code == 1 and f"{name} is not what" in output, output


@pytest.fixture
def child(storage: Path) -> tuple[Path, Path]:
    """Recipe of a public run that starts from the private phase, and that phase's checkpoint."""
    start = storage / RUN / "phases" / "private" / "checkpoint-00000008"
    content = yaml.safe_load((storage.parent / "small.yaml").read_text())
    content["name"] = "child"
    content["phases"] = [{**content["phases"][0], "init": str(start)}]
    del content["data"]["private"]
    recipe = storage.parent / "child.yaml"
    recipe.write_text(yaml.safe_dump(content))
    return recipe, start


def disown(checkpoint: Path, **facts: object) -> None:
    path = checkpoint / "checkpoint.json"
    content = json.loads(path.read_text())
    content["facts"].update(lineage=[], ledger_head=None, **facts)
    path.write_text(json.dumps(content))


def test_an_edited_start_is_refused(storage: Path, child: tuple[Path, Path]) -> None:
    recipe, start = child
    disown(start)
    code, output = dp_pretrain("run", recipe)
    assert code == 1 and "or what they started from, were made by" in output, output
    assert not (storage / "runs" / "child" / "phases").exists()


@pytest.mark.parametrize("facts", [{}, {"origin": []}], ids=["lineage", "lineage and origin"])
def test_an_edited_descendant_is_refused(
    storage: Path, child: tuple[Path, Path], facts: dict[str, object]
) -> None:
    """A public phase that went on from private weights: the ledger names what it made."""
    recipe, start = child
    code, output = dp_pretrain("run", recipe)
    assert code == 0, output
    words = ("privacy", "verify", "child", "--storage", storage)
    code, output = dp_pretrain(*words)
    assert code == 0 and "export: weights" in output, output
    (made,) = (storage / "runs" / "child" / "phases" / "warmup").glob("*06")
    disown(made, **facts)
    disown(start)
    code, output = dp_pretrain(*words)
    assert code == 1 and "were made by" in output, output


def test_what_cannot_be_checked_is_told(storage: Path) -> None:
    """Data that was deleted after the run: the statement stands, but for what the data says."""
    shutil.rmtree(storage / "data")
    code, output = verify(storage)
    assert code == 0 and "NOT checked: public_data of the statement (benchmark" in output, output
    assert "README.md (the prepared images of phases.warmup.data, synthetic, are gone)" in output
    edit_config(storage / RUN / "export")
    assert verify(storage)[0] == 1


def test_a_home_holds_domains_with_other_keys(
    storage: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = tmp_path / "key"
    key.touch(mode=0o600)
    key.write_bytes(bytes(range(32)))
    other = Ledger(str(storage / "domains"), "others", key=b"another's key, of 32 bytes or so")
    other.record_unprotected("theirs", "private", "not ours")
    code, output = verify(storage)
    assert code == 0 and "not signed" in output, output
    monkeypatch.setenv(KEY_FILE_VARIABLE, str(key))
    assert Descent(str(storage / "domains")).known("ab" * 32) == []
    assert verify(storage)[0] == 1, "our own ledger is not signed with the key"


def test_a_domain_that_grew_is_told(storage: Path) -> None:
    assert "since then" not in verify(storage)[1]
    assert dp_pretrain("run", storage.parent / "small.yaml", "--set", "name=other")[0] == 0
    code, output = verify(storage)
    assert code == 0 and "since then domain 'small-domain' was read again" in output, output
    assert (
        dp_pretrain(
            *("privacy", "unprotected", "small-domain", "--storage", storage, "--yes"),
            *("--who", "me", "--reason", "a look"),
        )[0]
        == 0
    )
    code, output = verify(storage)
    assert code == 0 and "all runs come to UNBOUNDED (stated:" in output, output


def test_show(storage: Path) -> None:
    ledger = Ledger(str(storage / "domains"), "small-domain")
    code, output = dp_pretrain("privacy", "show", "small", "--storage", storage)
    assert code == 0 and ledger.head().digest in output
    assert "total over all runs: epsilon" in output and "complete" in output
    assert dp_pretrain("privacy", "show", "small-domain", "--storage", storage) == (0, output)
    home = ["--ledger-home", storage / "domains"]
    assert dp_pretrain("privacy", "show", "small-domain", *home) == (0, output)
    code, other = dp_pretrain("privacy", "show", "small", *home)
    assert code == 1 and "known domains: ['small-domain']" in other
    ledger.record_unprotected("look", "debug", "a person looked at them")
    code, output = dp_pretrain("privacy", "show", "small", "--storage", storage)
    assert "a person looked at them" in output and "UNBOUNDED" in output
    code, output = dp_pretrain("privacy", "show", "nobody", "--storage", storage)
    assert code == 1 and "known runs: ['small']" in output


def test_unprotected_access_is_in_all_that_follows(storage: Path) -> None:
    """Recorded first; then the export's statement, its text, the report and verify say so."""
    run = storage / RUN
    words = ["privacy", "unprotected", "small", "--storage", storage, "--who", "a rehearsal"]
    words += ["--reason", "a baseline without noise"]
    code, output = dp_pretrain(*words)
    assert code == 1 and "cannot be undone" in output  # nobody said yes
    assert dp_pretrain("privacy", "verify", "small", "--storage", storage)[0] == 0
    code, output = dp_pretrain(*words, "--yes")
    assert code == 0 and "small-domain: recorded as entry" in output and "UNBOUNDED" in output
    code, output = verify(storage)
    assert code == 0 and "all runs: UNBOUNDED" in output, "what was stated before was true then"
    shutil.rmtree(run / "export")
    (run / "report.html").unlink()
    code, output = dp_pretrain("run", storage.parent / "small.yaml")
    assert code == 0 and "unbounded for the domain 'small-domain'" in output, output
    (statement,) = json.loads((run / "export" / "privacy.json").read_text())["statements"]
    assert statement["epsilon"]["domain"] == "unbounded"
    assert statement["epsilon"]["this_model"]["value"] <= 8
    says = {"export/PRIVACY.md": "UNBOUNDED", "export/README.md": "| no bound |"}
    for text, words in {**says, "report.html": "is unbounded: its records"}.items():
        assert words in (run / text).read_text(), text
    code, output = verify(storage)
    assert code == 0 and "all runs: UNBOUNDED" in output


def test_show_adds_up_the_phases_of_a_run(tmp_path: Path) -> None:
    ledger = Ledger(str(tmp_path / "domains"), "photos")
    mechanism = Mechanism(
        num_records=1_000,
        expected_batch_size=20,
        sampling_probability=0.02,
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        num_steps=40,
        delta=1e-4,
    )
    for phase in ("first", "second"):
        key = AttemptKey.from_os_entropy().commitment()
        attempt = ledger.open_attempt(
            run="two", phase=phase, mechanism=mechanism, key_commitment=key, first_step=0
        )
        attempt.charge(0, 40)
    code, output = dp_pretrain("privacy", "show", "photos", "--storage", tmp_path)
    cost = epsilon_of([(mechanism, 80)], 1e-4).value
    (line,) = [line for line in output.splitlines() if "all phases" in line]
    assert code == 0 and line.split() == ["two", "all", "phases", "2", "80", f"{cost},", "0.0001"]
