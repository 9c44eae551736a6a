"""`dp-pretrain audit`: the recipe's own mechanism, its JSON, its place in the report."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from faults import FAULTS
from small_recipe import dp_pretrain, write_small_recipe


def test_audit_of_a_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = write_small_recipe(tmp_path)
    assert dp_pretrain("run", recipe)[0] == 0
    code, output = dp_pretrain("audit", recipe, "--seed", "1")
    assert code == 0 and f"Report:   {tmp_path}/storage/runs/small/report.html" in output, output
    run = tmp_path / "storage" / "runs" / "small"
    result = json.loads((run / "audit.json").read_text())["phases"]["private"]
    assert result["passed"] and result["stamp"].startswith("NOT PRIVATE")
    assert result["lower_bound"]["epsilon"] <= result["claimed_epsilon"]["value"]
    plan = json.loads((run / "export" / "privacy.json").read_text())["statements"][0]
    promised = plan["phases"][0]["mechanism"]
    for name in ("sampling_probability", "noise_multiplier", "max_grad_norm"):
        assert result["mechanism"][name] == promised[name]
    assert "Phase private: passed" in (run / "report.html").read_text()
    code, output = dp_pretrain("run", recipe)
    assert code == 0 and "Run small is complete" in output
    assert not list(run.rglob("*canar*")), "an audit leaves no weights"

    FAULTS["noise x 0.9"](monkeypatch)
    out = tmp_path / "broken.json"
    code, output = dp_pretrain("audit", recipe, "--seed", "1", "--out", out)
    assert code == 1 and "FAIL  noise_scale" in output and "NOT PASSED" in output
    assert not json.loads(out.read_text())["phases"]["private"]["passed"]
    assert "Phase private: passed" in (run / "report.html").read_text()


def test_an_audit_is_kept_beside_the_run_of_its_own_recipe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And a finished run keeps its report, even where the new one cannot be written."""
    from pipeline.chain import auditing
    from pipeline.chain.layout import open_run
    from pipeline.chain.terminal import make_console

    recipe, runs = write_small_recipe(tmp_path), tmp_path / "storage" / "runs"
    assert dp_pretrain("run", recipe)[0] == 0
    monkeypatch.setattr(auditing, "audit_mechanism", lambda *_, **__: {"passed": True})
    monkeypatch.setattr(auditing, "table_lines", lambda result: [])
    other = ["--set", "phases.private.steps=4"]
    code, output = dp_pretrain("audit", recipe, *other)
    assert code == 0 and f"Audit:    {runs}/small-2/audit.json" in output
    assert "`dp-pretrain run` of this recipe writes it" in output
    assert not (runs / "small" / "audit.json").exists()

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    before = (runs / "small" / "report.html").read_bytes()
    monkeypatch.setattr(auditing, "report_stage", fail)
    with pytest.raises(OSError, match="No space"):
        auditing._renew_report(open_run("small", str(tmp_path / "storage")), make_console())
    assert (runs / "small" / "report.html").read_bytes() == before


def test_large_sets_are_cut_and_told(tmp_path: Path) -> None:
    from pipeline.audit.run import _scaled
    from pipeline.privacy.mechanism import Mechanism

    vip = Mechanism(
        num_records=233_000_000,
        expected_batch_size=98_304,
        sampling_probability=98_304 / 233_000_000,
        noise_multiplier=0.48,
        max_grad_norm=0.1,
        num_steps=6_000,
        delta=1 / 466e6,
    )
    scaled = _scaled(vip)
    assert scaled.noise_multiplier == 0.48 and scaled.max_grad_norm == 0.1
    assert scaled.sampling_probability == pytest.approx(vip.sampling_probability, rel=1e-3)


def test_a_public_recipe_has_nothing_to_audit(tmp_path: Path) -> None:
    path = tmp_path / "public.yaml"
    path.write_text(
        'name: public\ndata: {s: {source: "synthetic:textures?num_images=9&size=16", '
        "visibility: public, num_records: 9}}\nphases:\n  - {name: a, kind: public, data: s, "
        "steps: 3, batch_size: 2, optimizer: {learning_rate: 1.0e-3}}\n"
    )
    code, output = dp_pretrain("audit", path, "--set", f"storage={tmp_path}")
    assert code == 1 and "no private phase" in output


def test_membership_of_private_images_stays_in_the_private_log(tmp_path: Path) -> None:
    """PITFALLS 31: only the attack on public images is shown."""
    recipe = write_small_recipe(tmp_path)
    content = yaml.safe_load(recipe.read_text())
    content["data"]["private"]["splits"] = {"train": 0.5, "rest": 0.5}
    content["data"]["synthetic"]["splits"] = {"train": 0.6, "held_out": 0.4}
    content["phases"][0]["data"], content["phases"][1]["data"] = "synthetic.train", "private.train"
    content["phases"][0]["steps"] = 4
    recipe.write_text(yaml.safe_dump(content))
    code, output = dp_pretrain("run", recipe)
    assert code == 0, output
    code, output = dp_pretrain("audit", recipe, "--seed", "2")
    assert code == 0, output
    storage = tmp_path / "storage"
    shown = json.loads((storage / "runs" / "small" / "audit.json").read_text())["membership"]
    assert list(shown) == ["warmup"] and shown["warmup"]["members"] == "synthetic.train"
    assert "membership of phase private: in the private log" in output
    (line,) = (storage / "private" / "small-private-audit.jsonl").read_text().splitlines()
    kept = json.loads(line)["membership"]
    assert kept["members"] == "private.train" and kept["others"] == "private.rest"
    for value in (kept["auc"], *kept["intervals"]["auc"]):
        assert f"{value:.3f}" not in output.partition("membership of")[2]
        assert repr(value) not in (storage / "runs" / "small" / "audit.json").read_text()
