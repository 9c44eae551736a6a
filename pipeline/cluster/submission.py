"""A chain on a cluster somewhere else: submitted once, told of, read, ended; by its run's name."""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import requests
from ray.exceptions import AuthenticationError
from ray.job_submission import JobDetails, JobStatus, JobSubmissionClient
from ray.util.state import list_nodes

import pipeline
from pipeline.cluster.jobs import ENDED, numbered
from pipeline.cluster.local import OPEN_CLUSTER, SHARED_PATHS
from pipeline.recipe import Recipe
from pipeline.storage import Location

MAX_UPLOAD_BYTES = 5 * 10**6
_OLDEST_RAY = (2, 50)  # as in pyproject.toml
_ANSWER_SECONDS = 5.0
_STOP_SECONDS = 60.0
_POLL_SECONDS = 0.5
_MADE_UP = ("synthetic",)  # kinds of source that read nothing
_LEFT_OUT = ("__pycache__", "*.pyc", ".*")
_HOW_TO_AUTHENTICATE = (
    "export RAY_AUTH_MODE=token, with the cluster's token in ~/.ray/auth_token (mode 0600) or in "
    "RAY_AUTH_TOKEN"
)


class ClusterError(RuntimeError):
    """A cluster cannot be reached, used or asked; its message says what to do."""


@dataclass(frozen=True, kw_only=True)
class Submitted:
    """The chain of a run: its job, and whether it ran already."""

    job: str
    is_attached: bool


def open_client(address: str) -> JobSubmissionClient:
    """A client of the job API of a cluster, once everything about it is known to be right.

    Args:
        address: of the dashboard, as in http://127.0.0.1:8265.

    Raises:
        ClusterError: within seconds, for an address that is none or does not answer, a cluster open
            to anybody, a token that is missing or wrong, a Ray that is too old.
    """
    for name in ("RAY_API_SERVER_ADDRESS", "RAY_ADDRESS"):
        if os.environ.get(name, address).rstrip("/") != address.rstrip("/"):
            raise ClusterError(
                f"--address is {address!r}, and {name}={os.environ[name]} would win over it in "
                f"Ray's client: unset {name}"
            )
    if urlsplit(address).scheme not in ("http", "https"):
        raise ClusterError(
            f"--address is {address!r}: it must be the dashboard's address, as in "
            "http://127.0.0.1:8265 (`ray dashboard cluster.yaml` forwards that port to the head)"
        )
    _refuse_open(address)
    try:
        client = JobSubmissionClient(address)
        client.list_jobs()  # the version is told to anybody, jobs are not
    except AuthenticationError:
        raise ClusterError(
            f"the cluster at {address} did not take this caller's token: {_HOW_TO_AUTHENTICATE}"
        ) from None
    except (RuntimeError, OSError, ValueError) as error:
        raise ClusterError(f"the cluster at {address} could not be asked: {error}") from None
    _refuse_old(address, client._server_ray_version)  # Ray tells it in no other way
    return client


def _refuse_open(address: str) -> None:
    """One question without a token: it must be answered, and with a refusal."""
    try:
        answer = requests.get(f"{address.rstrip('/')}/api/jobs/", timeout=_ANSWER_SECONDS)
    except requests.exceptions.RequestException as error:
        raise ClusterError(
            f"--address is {address!r}, and nothing answers there ({type(error).__name__}): check "
            "that the head is up (ray status) and that its dashboard's port is forwarded "
            "(ray dashboard cluster.yaml, in another shell)"
        ) from None
    if answer.status_code == requests.codes.ok and os.environ.get(OPEN_CLUSTER) != "1":
        raise ClusterError(
            f"the cluster at {address} takes jobs from anybody who reaches it, beside the private "
            "images: start every node with RAY_AUTH_MODE=token, as cluster.yaml does; or, where "
            f"nobody else can reach it, export {OPEN_CLUSTER}=1"
        )
    if answer.status_code == requests.codes.not_found:
        raise ClusterError(
            f"--address is {address!r}, and what answers there is no Ray dashboard: give the head's"
        )


def _refuse_old(address: str, version: str | None) -> None:
    if version is None:
        return
    if tuple(int(part) for part in version.split(".")[:2]) < _OLDEST_RAY:
        wanted = ".".join(map(str, _OLDEST_RAY))
        raise ClusterError(
            f"the cluster at {address} runs Ray {version}; this program needs Ray {wanted} or "
            "newer there: install it on every node (setup_commands in cluster.yaml), and start "
            "the nodes anew"
        )


def submit_chain(
    client: JobSubmissionClient,
    address: str,
    recipe: Recipe,
    *,
    has_shared_paths: bool,
    origin: Path | None = None,
) -> Submitted:
    """Start the chain of a recipe as job `{run}-chain-{n}`, or find the one that runs.

    Args:
        has_shared_paths: every node sees the recipe's local paths, by a mount, say.
        origin: the folder that holds `pipeline/` and `jobs/`; default: where this package lies.

    Raises:
        ClusterError: for local paths that other machines do not see, too much to upload, or another
            recipe's chain that runs under this name.

    Guarantees:
        1. The same recipe twice, at once or one after the other, is one chain
           (test_two_submissions_are_one_chain).
    """
    recipe = _with_absolute_paths(recipe)
    if not has_shared_paths:
        _refuse_local_paths(recipe, address)
    digest = recipe.digest()
    prefix = f"{recipe.name}-chain-"
    while True:
        jobs = numbered(client, prefix)
        running = [job for job in jobs if job.status not in ENDED]
        if running:
            return _attached(running[0], recipe)
        job = f"{prefix}{len(jobs)}"
        with tempfile.TemporaryDirectory() as folder:
            _pack(Path(folder), recipe, origin or Path(pipeline.__file__).parents[1])
            try:
                client.submit_job(
                    entrypoint="python jobs/chain.py recipe.yaml",
                    submission_id=job,
                    runtime_env={"working_dir": folder, "env_vars": _environment(has_shared_paths)},
                    metadata={
                        "run": recipe.name,
                        "stage": "chain",
                        "recipe_digest": digest,
                        "storage": recipe.storage,
                    },
                )
            except RuntimeError as error:
                if any(known.submission_id == job for known in client.list_jobs()):
                    continue  # another submission was first
                raise ClusterError(f"job {job} was not taken: {error}") from None
        return Submitted(job=job, is_attached=False)


def _attached(job: JobDetails, recipe: Recipe) -> Submitted:
    found = (job.metadata or {}).get("recipe_digest")
    if found != recipe.digest():
        raise ClusterError(
            f"run {recipe.name!r} is under way by another recipe (job {job.submission_id}): "
            f"give this one another name (--set name=…), or `dp-pretrain cancel {recipe.name}`"
        )
    assert job.submission_id
    return Submitted(job=job.submission_id, is_attached=True)


def _environment(has_shared_paths: bool) -> dict[str, str]:
    passed = {SHARED_PATHS: "1"} if has_shared_paths else {}
    if os.environ.get(OPEN_CLUSTER) == "1":
        passed[OPEN_CLUSTER] = "1"
    return passed


def _with_absolute_paths(recipe: Recipe) -> Recipe:
    """Relative paths made absolute here: the job runs in another folder."""
    sources = {}
    for name, dataset in recipe.data.items():
        kind, _, place = dataset.source.partition(":")
        if kind not in _MADE_UP and not place.startswith("~"):
            place = ",".join(str(Location(part)) for part in place.split(","))
        sources[name] = dataset.model_copy(update={"source": f"{kind}:{place}"})
    return recipe.model_copy(update={"storage": str(Location(recipe.storage)), "data": sources})


def local_paths(recipe: Recipe) -> dict[str, str]:
    """The recipe's keys that name a path of one machine, and the paths."""
    found = {"storage": recipe.storage, "ledger_home": recipe.ledgers}
    for name, dataset in recipe.data.items():
        kind, _, place = dataset.source.partition(":")
        if kind not in _MADE_UP:
            found[f"data.{name}.source"] = place
    for phase in recipe.phases:
        if phase.init not in ("previous", "fresh"):
            found[f"phases.{phase.name}.init"] = phase.init
    return {key: place for key, place in found.items() if "://" not in place}


def _refuse_local_paths(recipe: Recipe, address: str) -> None:
    paths = local_paths(recipe)
    if not paths:
        return
    others = [node for node in _node_addresses(address) if node not in _own_addresses()]
    if others:
        named = ", ".join(f"{key} is {place!r}" for key, place in paths.items())
        raise ClusterError(
            f"{named}: a path of this machine, and the cluster has others ({', '.join(others)}): "
            "put it in an object store (s3://…, gs://…); or, if every node mounts these very "
            "paths, say --shared-paths"
        )


def _node_addresses(address: str) -> list[str]:
    nodes = list_nodes(address=address, filters=[("state", "=", "ALIVE")], timeout=10)
    return [node.node_ip for node in nodes]


def _own_addresses() -> set[str]:
    found = {"127.0.0.1"}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # nothing is sent: it only chooses the interface
            found.add(probe.getsockname()[0])
        except OSError:
            pass
    try:
        found |= set(socket.gethostbyname_ex(socket.gethostname())[2])
    except OSError:
        pass
    return found


def _pack(folder: Path, recipe: Recipe, origin: Path) -> None:
    """The package, the jobs and the resolved recipe in a folder of their own."""
    if not (origin / "jobs" / "chain.py").exists():
        raise ClusterError(
            f"{origin} holds no jobs/chain.py: `submit` sends the code of a checkout; run it from "
            "an editable installation (pip install -e .)"
        )
    ignore = shutil.ignore_patterns(*_LEFT_OUT)
    for name in ("pipeline", "jobs"):
        shutil.copytree(origin / name, folder / name, ignore=ignore)
    (folder / "recipe.yaml").write_text(recipe.to_yaml())
    sizes = {p.relative_to(folder): p.stat().st_size for p in folder.rglob("*") if p.is_file()}
    total = sum(sizes.values())
    if total > MAX_UPLOAD_BYTES:
        largest = max(sizes, key=lambda path: sizes[path])
        raise ClusterError(
            f"code and recipe come to {total / 1e6:.1f} MB, and at most "
            f"{MAX_UPLOAD_BYTES / 1e6:.0f} MB are sent; the largest file is {origin / largest} "
            f"({sizes[largest] / 1e6:.1f} MB): move what is no code out of pipeline/ and jobs/"
        )


def jobs_of(client: JobSubmissionClient, run: str) -> list[JobDetails]:
    """The jobs of a run, oldest first. Raises ClusterError if there are none; it names the runs."""
    jobs = sorted(client.list_jobs(), key=lambda job: job.start_time or 0)
    names = [(_told(job, "run"), _told(job, "asked_as"), job) for job in jobs]
    found = [job for own, asked, job in names if run in (own, asked)]
    if not found:
        known = sorted({own for own, _, _ in names if own})
        raise ClusterError(
            f"run {run!r}: this cluster has no job of it; runs it knows: {known} (jobs are "
            "forgotten when the head goes; what is finished stays in storage)"
        )
    return found


def _told(job: JobDetails, key: str) -> str | None:
    return (job.metadata or {}).get(key)


def job_lines(client: JobSubmissionClient, jobs: Sequence[JobDetails]) -> list[tuple[str, str]]:
    """(job, its state and the last line it printed) of the newest job of each stage."""
    newest: dict[str, JobDetails] = {}
    for job in jobs:
        newest[_told(job, "stage") or ""] = job
    lines = []
    for stage, job in newest.items():
        assert job.submission_id
        state = str(job.status.value).lower()
        if stage != "chain":
            printed = client.get_job_logs(job.submission_id).strip().splitlines()
            state += f"; {printed[-1].strip()}" if printed else ""
        lines.append((job.submission_id, state))
    return lines


def chain_storage(jobs: Sequence[JobDetails]) -> str | None:
    """Where the run lives, as its jobs were told."""
    return next((place for job in reversed(jobs) if (place := _told(job, "storage"))), None)


def log_of(client: JobSubmissionClient, run: str, stage: str) -> Iterator[str]:
    """What the newest job of a stage of a run printed, so far and until it ends."""
    stages = {_told(job, "stage"): job for job in jobs_of(client, run)}
    if stage not in stages:
        raise ClusterError(f"run {run!r} has no job {stage!r}; it has {sorted(map(str, stages))}")
    job = stages[stage].submission_id
    assert job
    shown = 0
    while True:
        has_ended = client.get_job_status(job) in ENDED
        text = client.get_job_logs(job)
        yield text[shown:]
        shown = len(text)
        if has_ended:
            return
        time.sleep(_POLL_SECONDS)


def cancel_run(
    client: JobSubmissionClient, run: str, say: Callable[[str], None] = lambda line: None
) -> Mapping[str, JobStatus]:
    """Stop the chain of a run, then the stage under way, and wait until both are gone.

    What a phase was charged stays charged, and its last checkpoint stays good: the same submission
    goes on from there.

    Returns:
        How each job that was stopped ended.

    Raises:
        ClusterError: for a job that did not end in time.
    """
    jobs = [job for job in jobs_of(client, run) if job.status not in ENDED]
    names = [job.submission_id for job in jobs if job.submission_id]
    names.sort(key=lambda name: "-chain-" not in name)  # the chain first: it submits no other
    ended: dict[str, JobStatus] = {}
    for name in names:
        client.stop_job(name)
        say(f"job {name}: told to stop")
        deadline = time.monotonic() + _STOP_SECONDS
        while (status := client.get_job_status(name)) not in ENDED:
            if time.monotonic() > deadline:
                raise ClusterError(
                    f"job {name} has not ended after {_STOP_SECONDS:.0f} s: look at "
                    f"`ray job logs {name}`, and cancel again"
                )
            time.sleep(_POLL_SECONDS)
        ended[name] = status
    return ended
