"""jobs/kubernetes/rayjob.yaml has what KubeRay's RayJob asks for, and costs only its head idle.

The fields below are those of KubeRay v1.6.2 (ray.io/v1), from its API reference:
https://docs.ray.io/en/master/cluster/kubernetes/references/api.html
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

FILE = Path(__file__).parents[2] / "jobs" / "kubernetes" / "rayjob.yaml"
GIBI = 2**30

REQUIRED = {
    "RayJob": {"apiVersion", "kind", "metadata", "spec"},
    "RayClusterSpec": {"headGroupSpec"},
    "HeadGroupSpec": {"template"},
    "WorkerGroupSpec": {"groupName", "minReplicas", "maxReplicas", "template"},
    "PodSpec": {"containers"},
    "Container": {"name", "image"},
}
KNOWN = {
    "RayJobSpec": {
        "entrypoint",
        "submissionMode",
        "shutdownAfterJobFinishes",
        "ttlSecondsAfterFinished",
        "backoffLimit",
        "metadata",
        "runtimeEnvYAML",
        "rayClusterSpec",
    },
    "RayClusterSpec": {
        "rayVersion",
        "authOptions",
        "enableInTreeAutoscaling",
        "autoscalerOptions",
        "headGroupSpec",
        "workerGroupSpecs",
    },
    "HeadGroupSpec": {"rayStartParams", "template"},
    "WorkerGroupSpec": {
        "groupName",
        "replicas",
        "minReplicas",
        "maxReplicas",
        "rayStartParams",
        "template",
    },
}


@pytest.fixture
def job() -> dict[str, Any]:
    return yaml.safe_load(FILE.read_text())


def groups(job: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    cluster = job["spec"]["rayClusterSpec"]
    workers = [("WorkerGroupSpec", group) for group in cluster["workerGroupSpecs"]]
    return [("HeadGroupSpec", cluster["headGroupSpec"]), *workers]


def test_required_fields_are_there_and_no_other_is_made_up(job: dict[str, Any]) -> None:
    parts = [("RayJob", job), ("RayJobSpec", job["spec"])]
    parts += [("RayClusterSpec", job["spec"]["rayClusterSpec"]), *groups(job)]
    for _, group in groups(job):
        pod = group["template"]["spec"]
        parts += [("PodSpec", pod), *(("Container", each) for each in pod["containers"])]
    for kind, part in parts:
        assert part.keys() >= REQUIRED.get(kind, set()), kind
        assert part.keys() <= KNOWN.get(kind, part.keys()), kind
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob")
    allowed = {"K8sJobMode", "HTTPMode", "InteractiveMode", "SidecarMode"}
    assert job["spec"]["submissionMode"] in allowed
    texts = [group["rayStartParams"] for _, group in groups(job)]
    assert all(isinstance(value, str) for params in texts for value in params.values())


def test_idle_it_is_the_head_alone(job: dict[str, Any]) -> None:
    cluster = job["spec"]["rayClusterSpec"]
    workers = {group["groupName"]: group for group in cluster["workerGroupSpecs"]}
    assert workers.keys() == {"data", "gpu"}
    for group in workers.values():
        assert group["replicas"] == group["minReplicas"] == 0 < group["maxReplicas"]
    assert cluster["enableInTreeAutoscaling"] is True
    assert 0 < cluster["autoscalerOptions"]["idleTimeoutSeconds"] <= 600
    assert job["spec"]["shutdownAfterJobFinishes"] is True, "the head goes with the chain"
    assert cluster["headGroupSpec"]["rayStartParams"]["num-cpus"] == "0"


def test_only_the_gpu_group_has_gpus(job: dict[str, Any]) -> None:
    for kind, group in groups(job):
        (container,) = group["template"]["spec"]["containers"]
        resources = container["resources"]
        assert resources["requests"] == resources["limits"], "Ray counts the limits"
        has_gpus = "nvidia.com/gpu" in resources["limits"]
        assert has_gpus == (kind == "WorkerGroupSpec" and group["groupName"] == "gpu")


def test_object_stores_fit_their_shared_memory(job: dict[str, Any]) -> None:
    for kind, group in groups(job):
        pod = group["template"]["spec"]
        size = int(group["rayStartParams"]["object-store-memory"])
        memory = pod["containers"][0]["resources"]["limits"]["memory"]
        assert size <= int(memory.removesuffix("Gi")) * GIBI / 3
        if kind == "WorkerGroupSpec":
            (shared,) = pod["volumes"]
            assert pod["containers"][0]["volumeMounts"][0]["mountPath"] == "/dev/shm"
            assert size < int(shared["emptyDir"]["sizeLimit"].removesuffix("Gi")) * GIBI


def test_the_token_comes_from_a_secret_and_is_not_written_here(job: dict[str, Any]) -> None:
    """PITFALLS 29."""
    options = job["spec"]["rayClusterSpec"]["authOptions"]
    assert options == {"mode": "token", "secretName": "dp-pretrain-ray-token"}
    assert "RAY_AUTH_TOKEN" not in FILE.read_text(), "the operator sets it from the secret"
