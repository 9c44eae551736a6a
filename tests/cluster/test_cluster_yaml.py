"""cluster.yaml is what Ray accepts, costs only its head while idle, and opens nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
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
    assert all(node["min_workers"] == 0 < node["max_workers"] for node in types.values())
    assert cluster["idle_timeout_minutes"] <= 10


def test_the_dashboard_stays_on_loopback_and_asks_for_a_token(cluster: dict[str, Any]) -> None:
    """PITFALLS 29: Ray's own head command opens the job API to the network."""
    head = " ".join(cluster["head_start_ray_commands"])
    worker = " ".join(cluster["worker_start_ray_commands"])
    assert "--dashboard-host=127.0.0.1" in head and "0.0.0.0" not in head
    assert "RAY_AUTH_MODE=token" in head and "RAY_AUTH_MODE=token" in worker
    assert "/home/ubuntu/.ray/auth_token" in cluster["file_mounts"]
    assert "chmod 600 ~/.ray/auth_token" in cluster["setup_commands"]


def test_workers_may_be_spot_and_reach_the_bucket(cluster: dict[str, Any]) -> None:
    for name in ("data", "gpu"):
        config = cluster["available_node_types"][name]["node_config"]
        assert config["InstanceMarketOptions"] == {"MarketType": "spot"}
        assert config["IamInstanceProfile"]


def test_it_installs_this_package(cluster: dict[str, Any]) -> None:
    assert any("pip install" in c and "dp-pretrain" in c for c in cluster["setup_commands"])
