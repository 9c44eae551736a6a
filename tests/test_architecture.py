"""The import rules of the house (pipeline/README.md): who may use whom, and no cycles."""

from __future__ import annotations

import ast
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "pipeline"
FILES = sorted(PACKAGE.rglob("*.py"))

# What each room may import of the others; its own files and pipeline.storage are always allowed.
ALLOWED = {
    "storage": set(),
    "recipe": {"recipe_text"},
    "recipe_text": set(),
    "privacy": set(),
    "models": set(),
    "dpsgd": set(),
    "data": {"privacy.sampling"},  # data.stream alone
    "plan": {"recipe", "privacy", "models.sizes", "data.sources"},
    "training": {"recipe", "privacy", "data", "models", "dpsgd"},
    "evaluation": {"data", "models"},
    "report": {"privacy"},
    "audit": {"recipe", "privacy", "data", "models", "dpsgd", "training", "evaluation"},
    "chain": {"recipe", "plan", "privacy", "data", "models", "training", "evaluation", "report"}
    | {"cluster", "audit"},
    "cluster": {"recipe"},
    "cli": {"recipe", "plan", "chain", "cluster"},
}
RAY_FILES = {
    "data/prepare/executors.py",
    "data/stream.py",
    "training/workers.py",
    "cluster/local.py",
    "cluster/jobs.py",
    "cluster/readiness.py",
    "cluster/submission.py",
}
TORCH_FREE = (
    "privacy/",
    "report/",
    "recipe.py",
    "recipe_text.py",
    "plan.py",
    "cli.py",
    "models/sizes.py",
)


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports_of(path: Path) -> list[str]:
    """Every module named by an import statement, lazy ones and TYPE_CHECKING ones included."""
    names: list[str] = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: write absolute imports"
            names.append(node.module or "")
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    return names


def room_of(module: str) -> str:
    return module.split(".")[1] if "." in module else ""


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_follow_the_map(path: Path) -> None:
    room = room_of(module_name(path))
    if not room:
        return
    assert room in ALLOWED, f"{path} is in no known room: add it to the map and to this test"
    for name in imports_of(path):
        if not name.startswith("pipeline."):
            assert not name.startswith("jobs"), f"{path} imports {name}: nothing imports jobs"
            continue
        target = room_of(name)
        if target in (room, "storage") or not target:
            continue
        below = name.removeprefix("pipeline.")
        allowed = any(below == a or below.startswith(a + ".") for a in ALLOWED[room])
        assert allowed, f"{path.relative_to(ROOT)} must not import {name}"


def test_only_the_stream_reaches_privacy_from_data() -> None:
    users = [
        path.relative_to(PACKAGE).as_posix()
        for path in (PACKAGE / "data").rglob("*.py")
        if any(name.startswith("pipeline.privacy") for name in imports_of(path))
    ]
    assert set(users) <= {"data/stream.py"}


def test_ray_stays_where_the_map_says() -> None:
    for path in FILES:
        name = path.relative_to(PACKAGE).as_posix()
        if any(module.split(".")[0] == "ray" for module in imports_of(path)):
            assert name in RAY_FILES, f"pipeline/{name} imports ray"


def test_torch_stays_out_of_what_is_promised() -> None:
    for path in FILES:
        name = path.relative_to(PACKAGE).as_posix()
        if name.startswith(TORCH_FREE):
            heavy = {module.split(".")[0] for module in imports_of(path)} & {"torch", "timm"}
            assert not heavy, f"pipeline/{name} imports {heavy}"


def test_no_import_cycle() -> None:
    modules = {module_name(path): path for path in FILES}
    graph = {
        name: {target for target in imports_of(path) if target in modules and target != name}
        for name, path in modules.items()
        if path.name != "__init__.py"
    }
    TopologicalSorter(graph).prepare()  # raises CycleError and names the cycle


def test_no_room_without_a_name() -> None:
    vague = {"utils", "common", "misc", "helpers", "util", "helper"}
    found = [path for path in FILES if vague & set(path.with_suffix("").parts)]
    assert not found
    assert all(len(path.read_text().splitlines()) <= 600 for path in FILES)


def test_jobs_are_thin() -> None:
    for path in sorted((ROOT / "jobs").glob("*.py")):
        if path.name != "fetch_demo_images.py":
            assert len(path.read_text().splitlines()) <= 60, f"{path} is no thin script any more"
