"""A Ray of one's own on this machine, or the cluster this process already belongs to."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ray
import ray.data  # configures its logging when it is imported, so before ours
import ray.train

_TOKEN_FILE = Path("~/.ray/auth_token").expanduser()
OPEN_CLUSTER = "DP_PRETRAIN_ALLOW_OPEN_CLUSTER"
SHARED_PATHS = "DP_PRETRAIN_SHARED_PATHS"


@contextmanager
def connected() -> Iterator[None]:
    """Connect to the cluster of this job, else start a local Ray and end it afterwards.

    A local Ray gets more logical CPUs than the machine has cores, so that training workers leave
    some to the data tasks. Worker output stays in Ray's log files: what people see is the driver's
    own progress, and nothing private can reach the console from a task.
    """
    if ray.is_initialized():
        yield
        return
    if os.environ.get("RAY_ADDRESS"):
        require_authentication()
    os.environ.setdefault("RAY_TRAIN_V2_ENABLED", "1")
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    on_sigterm = signal.getsignal(signal.SIGTERM)
    if os.environ.get("RAY_ADDRESS"):
        ray.init(**quiet)
    else:
        cores = os.cpu_count() or 1
        ray.init(address="local", num_cpus=max(6, cores + 4), include_dashboard=False, **quiet)
        _protect_token()
    if callable(on_sigterm):  # Ray's own prints the machine's stack
        signal.signal(signal.SIGTERM, on_sigterm)
    for name in ("ray.data", "ray.train"):
        logging.getLogger(name).setLevel(logging.WARNING)
    try:
        yield
    finally:
        ray.shutdown()


def require_authentication() -> None:
    """Refuse a cluster whose job API runs anybody's code.

    Whoever may submit a job there may read the private images and the keys in memory
    (CVE-2023-48022). Ray tells every process of a cluster by RAY_AUTH_MODE how callers are known.

    Raises:
        RuntimeError: unless the mode is token or k8s, or DP_PRETRAIN_ALLOW_OPEN_CLUSTER=1 says that
            nobody else can reach the cluster.
    """
    mode = os.environ.get("RAY_AUTH_MODE", "")
    if mode.lower() in ("token", "k8s") or os.environ.get(OPEN_CLUSTER) == "1":
        return
    raise RuntimeError(
        f"RAY_AUTH_MODE is {mode!r} on this Ray cluster: anybody who reaches its job API runs code "
        "beside the private images. Start every node with RAY_AUTH_MODE=token and a token "
        "(ray get-auth-token --generate; chmod 600 ~/.ray/auth_token), as cluster.yaml does; or, "
        f"where nobody else can reach it, submit with {OPEN_CLUSTER}=1 in the job's environment"
    )


def _protect_token() -> None:
    """Ray writes its authentication token readable by all; only the owner may read it."""
    if _TOKEN_FILE.exists():
        _TOKEN_FILE.chmod(0o600)
