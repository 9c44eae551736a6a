"""PITFALLS 29: a cluster whose job API is open to anybody is refused."""

from __future__ import annotations

import pytest

from pipeline.cluster.local import connected, require_authentication


@pytest.mark.parametrize("mode", [None, "", "disabled", "tokens"])
def test_open_clusters_are_refused(monkeypatch: pytest.MonkeyPatch, mode: str | None) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    monkeypatch.delenv("DP_PRETRAIN_ALLOW_OPEN_CLUSTER", raising=False)
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    if mode is not None:
        monkeypatch.setenv("RAY_AUTH_MODE", mode)
    monkeypatch.setattr("ray.is_initialized", lambda: False)
    monkeypatch.setattr("ray.init", lambda **options: pytest.fail("connected"))
    with pytest.raises(RuntimeError, match=r"RAY_AUTH_MODE is .* cluster.yaml does"):
        with connected():
            pytest.fail("connected")
    monkeypatch.setenv("DP_PRETRAIN_ALLOW_OPEN_CLUSTER", "1")
    require_authentication()


@pytest.mark.parametrize("mode", ["token", "TOKEN", "k8s"])
def test_authenticated_clusters_are_used(monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    monkeypatch.setenv("RAY_AUTH_MODE", mode)
    require_authentication()
