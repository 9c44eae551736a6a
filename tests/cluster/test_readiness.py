"""Nodes that differ, or do not see the storage, are named before a phase starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.cluster.readiness import NotReady, check_nodes, node_facts, refuse_differences


@pytest.mark.ray
def test_a_cluster_of_one_kind_is_ready(ray_local: None, tmp_path: Path) -> None:
    check_nodes(str(tmp_path))
    assert not list(tmp_path.iterdir()), "what was written to ask is taken away"


def test_another_version_is_named() -> None:
    here, other = node_facts(), node_facts()
    refuse_differences("s3://bucket", here, {"a": here, "b": other})
    other["versions"]["torch"] = "1.0"
    with pytest.raises(NotReady, match=r"node b has torch 1.0 \(here .*same versions"):
        refuse_differences("s3://bucket", here, {"a": here, "b": other})


def test_a_node_that_does_not_see_the_storage_is_named(tmp_path: Path) -> None:
    here, blind = node_facts(), node_facts(str(tmp_path / "elsewhere" / "mark"))
    with pytest.raises(NotReady, match=r"storage is '/x', and node b does not see what was just"):
        refuse_differences("/x", here, {"b": blind})
