"""Do the nodes of a cluster agree, and do they see the storage? Asked before a phase is started."""

from __future__ import annotations

import platform
import uuid
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from pipeline.storage import Location

_PACKAGES = ("ray", "torch", "torchvision", "numpy", "pyarrow", "timm", "safetensors")
_ANSWER_SECONDS = 60.0


class NotReady(RuntimeError):
    """A cluster on which a phase would fail, or give another result on some nodes."""


def check_nodes(storage: str) -> None:
    """Every node that is there now has the same versions, and reads and writes the storage.

    Asks each node by a task of no CPU; nodes that the autoscaler brings later are not asked.

    Raises:
        NotReady: naming the node, what differs and what to do.
    """
    mark = Location(storage) / f".seen-{uuid.uuid4().hex[:8]}"
    mark.write_bytes(b"seen")
    try:
        refuse_differences(storage, node_facts(), _ask_all(str(mark)))
    finally:
        mark.delete()


def refuse_differences(
    storage: str, here: Mapping[str, Any], nodes: Mapping[str, Mapping[str, Any]]
) -> None:
    """As `check_nodes`, of what the nodes have answered."""
    for node, facts in nodes.items():
        differing = [
            f"{name} {facts['versions'].get(name)} (here {wanted})"
            for name, wanted in here["versions"].items()
            if facts["versions"].get(name) != wanted
        ]
        if differing:
            raise NotReady(
                f"node {node} has {', '.join(differing)}: the ranks of a phase must compute alike; "
                "install the same versions on every node (setup_commands, or one image for all)"
            )
        if facts["problem"]:
            raise NotReady(
                f"storage is {storage!r}, and node {node} {facts['problem']}: give an object store "
                "that its role may read and write, or a path that every node mounts"
            )


def node_facts(mark: str | None = None) -> dict[str, Any]:
    """Versions of this node, and what keeps it from using the storage that holds `mark`."""
    versions = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = "none"
    return {"versions": versions, "problem": _storage_problem(mark) if mark else None}


def _storage_problem(mark: str) -> str | None:
    place = Location(mark)
    try:
        if place.read_bytes() != b"seen":
            return "reads something else there"
        answer = Location(f"{mark}-{uuid.uuid4().hex[:8]}")
        answer.write_bytes(b"")
        answer.delete()
    except FileNotFoundError:
        return "does not see what was just written there"
    except OSError as error:
        return f"cannot use it ({type(error).__name__})"
    return None


def _ask_all(mark: str) -> dict[str, dict[str, Any]]:
    asked: dict[str, Any] = {}
    ask: Any = ray.remote(num_cpus=0, max_retries=0)(node_facts)
    for node in ray.nodes():
        if node["Alive"]:
            where = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
            name = f"{node['NodeManagerAddress']} ({node['NodeID'][:6]})"
            asked[name] = ask.options(scheduling_strategy=where).remote(mark)
    try:
        return dict(zip(asked, ray.get(list(asked.values()), timeout=_ANSWER_SECONDS), strict=True))
    except (ray.exceptions.RayError, TimeoutError) as error:
        raise NotReady(
            f"a node of the cluster did not answer ({type(error).__name__}): see `ray status`; "
            "where a node is just leaving, submit again"
        ) from None
