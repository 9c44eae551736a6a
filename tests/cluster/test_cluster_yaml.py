"""cluster.yaml is what Ray accepts, costs only its head while idle, and opens nothing."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
GIBI = 2**30
# What AWS says of the machine types that cluster.yaml names: CPUs, GPUs, GiB of memory.
MACHINES = {
    "m6i.2xlarge": (8, 0, 32),
    "m6i.16xlarge": (64, 0, 256),
    "p4d.24xlarge": (96, 8, 1152),
}
MACHINE_NAME = re.compile(r"\b[a-z]+\d+[a-z-]*\.(?:\d*x?large|metal)\b")


@pytest.fixture
def cluster() -> dict[str, Any]:
    return yaml.safe_load((ROOT / "cluster.yaml").read_text())


def test_ray_accepts_it(cluster: dict[str, Any]) -> None:
    from ray.autoscaler._private.util import prepare_config, validate_config

    prepared = prepare_config(dict(cluster))
    validate_config(prepared)
    assert set(prepared["available_node_types"]) == {"head", "data", "gpu"}


def test_idle_it_is_the_head_alone(cluster: dict[str, Any]) -> None:
    types = cluster["available_node_types"]
    head = types.pop(cluster["head_node_type"])
    assert head["resources"] == {"CPU": 0, "GPU": 0}, "no training and no data tasks on the head"
    assert "min_workers" not in head, "the head is one node"
    assert all(node["min_workers"] == 0 < node["max_workers"] for node in types.values())
    assert 0 < cluster["idle_timeout_minutes"] <= 10
    assert cluster["provider"]["cache_stopped_nodes"] is False, "stopped nodes' disks are paid for"


def test_it_is_aws_with_cpu_head_cpu_data_workers_and_gpu_workers(cluster: dict[str, Any]) -> None:
    """What Ray is told of a node is what the machine has; the head offers nothing."""
    assert cluster["provider"]["type"] == "aws"
    for name, node in cluster["available_node_types"].items():
        cpus, gpus, _ = MACHINES[node["node_config"]["InstanceType"]]
        assert (gpus > 0) == (name == "gpu")
        if name != cluster["head_node_type"]:
            assert node["resources"] == {"CPU": cpus, "GPU": gpus}
            assert node["max_workers"] <= cluster["max_workers"]


@pytest.mark.parametrize(
    ("command", "nodes"),
    [("head_start_ray_commands", ["head"]), ("worker_start_ray_commands", ["data", "gpu"])],
)
def test_object_stores_have_a_size_that_fits(
    cluster: dict[str, Any], command: str, nodes: list[str]
) -> None:
    """Ray puts the store in /dev/shm, which is half of the memory; a larger one lies on disk."""
    (size,) = re.findall(r"--object-store-memory=(\d+)", " ".join(cluster[command]))
    for name in nodes:
        machine = cluster["available_node_types"][name]["node_config"]["InstanceType"]
        assert GIBI <= int(size) <= MACHINES[machine][2] * GIBI / 2


def test_no_other_file_names_machines() -> None:
    folders = ("pipeline", "jobs", "benchmarks", "docs")
    kinds = {".py", ".yaml", ".md", ".sh", ".html", ".toml"}
    files = [ROOT / "README.md", ROOT / "Makefile", ROOT / "pyproject.toml"]
    files += [f for d in folders for f in (ROOT / d).rglob("*") if f.suffix in kinds]
    assert MACHINE_NAME.findall((ROOT / "cluster.yaml").read_text()), "the pattern finds none"
    assert [f for f in files if MACHINE_NAME.search(f.read_text())] == []


def test_the_dashboard_stays_on_loopback_and_asks_for_a_token(cluster: dict[str, Any]) -> None:
    """PITFALLS 29: Ray's own head command opens the job API to the network."""
    head = " ".join(cluster["head_start_ray_commands"])
    worker = " ".join(cluster["worker_start_ray_commands"])
    assert "--dashboard-host=127.0.0.1" in head and "0.0.0.0" not in head
    assert "RAY_AUTH_MODE=token" in head and "RAY_AUTH_MODE=token" in worker
    assert "RAY_AUTH_MODE=token" in " ".join(cluster["setup_commands"]), "for what jobs start"
    mounts = cluster["file_mounts"]
    assert mounts["/home/ubuntu/.ray/auth_token"] == "~/.ray/auth_token"
    assert cluster["setup_commands"][0] == "chmod 600 ~/.ray/auth_token", "before anything starts"
    assert "AUTH_TOKEN" not in (ROOT / "cluster.yaml").read_text(), "no token in the file itself"


def test_workers_may_be_spot_and_reach_the_bucket(cluster: dict[str, Any]) -> None:
    for name in ("data", "gpu"):
        config = cluster["available_node_types"][name]["node_config"]
        assert config["InstanceMarketOptions"] == {"MarketType": "spot"}
        assert config["IamInstanceProfile"]


def test_it_installs_this_package(cluster: dict[str, Any]) -> None:
    assert any("pip install" in c and "dp-pretrain" in c for c in cluster["setup_commands"])
