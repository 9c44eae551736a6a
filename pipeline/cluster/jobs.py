"""One stage of a chain as its own Ray job: submitted once, followed, and never run twice."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ray.job_submission import JobDetails, JobStatus, JobSubmissionClient

_POLL_SECONDS = 2.0
ENDED = (JobStatus.SUCCEEDED, JobStatus.FAILED, JobStatus.STOPPED)


class StageFailed(RuntimeError):
    """A stage's job ended without its marker in storage."""


@dataclass(frozen=True, kw_only=True)
class Stage:
    """A step of the chain.

    Args:
        name: as in the job id `{run}-{name}-{n}`.
        entrypoint: the shell command of the job.
        is_done: whether the stage's marker is in storage; the only truth about success.
    """

    name: str
    entrypoint: str
    is_done: Callable[[], bool]


def follow_stage(
    client: JobSubmissionClient,
    run: str,
    stage: Stage,
    *,
    runtime_env: Mapping[str, Any],
    metadata: Mapping[str, str],
    say: Callable[[str], None],
) -> None:
    """Bring a stage to its end: skip it if done, attach if its job runs, else submit the next one.

    Raises:
        StageFailed: if the job ended and the marker is not there.
    """
    job = None
    while job is None:
        mine = numbered(client, f"{run}-{stage.name}-")
        running = [known for known in mine if known.status not in ENDED]
        if running:
            job = running[0].submission_id
            say(f"{stage.name}: job {job} is running already; following it")
        elif stage.is_done():
            say(f"{stage.name}: done")
            return
        else:
            job = f"{run}-{stage.name}-{len(mine)}"
            told = {**metadata, "run": run, "stage": stage.name}
            job = _submit(client, job, stage.entrypoint, dict(runtime_env), told)
            if job is not None:
                say(f"{stage.name}: submitted as job {job}")
    status = _follow(client, job, say)
    if not stage.is_done():
        raise StageFailed(
            f"{stage.name}: job {job} ended as {status} and left no result; see "
            f"`ray job logs {job}`. The same command tries again from where it stopped"
        )


def numbered(client: JobSubmissionClient, prefix: str) -> list[JobDetails]:
    """The jobs whose id is the prefix and a number."""
    named = [(job.submission_id or "", job) for job in client.list_jobs()]
    return [j for name, j in named if name.startswith(prefix) and name[len(prefix) :].isdigit()]


def _submit(
    client: JobSubmissionClient,
    job: str,
    entrypoint: str,
    runtime_env: dict[str, Any],
    metadata: dict[str, str],
) -> str | None:
    """The job's id; None if another chain was first to take it."""
    try:
        client.submit_job(
            entrypoint=entrypoint, submission_id=job, runtime_env=runtime_env, metadata=metadata
        )
    except RuntimeError:
        if any(known.submission_id == job for known in client.list_jobs()):
            return None
        raise
    return job


def parent_runtime_env() -> dict[str, Any]:
    """Code and environment of the job this process runs in, so that child jobs have the same."""
    environment = _job_config().get("runtime_env", {})
    kept = {name: environment.get(name) for name in ("working_dir", "env_vars")}
    return {name: value for name, value in kept.items() if value}


def parent_metadata() -> dict[str, str]:
    """By which name the run was asked for, if this process runs in a job that knows."""
    run = _job_config().get("metadata", {}).get("run")
    return {"asked_as": run} if run else {}


def _job_config() -> dict[str, Any]:
    return json.loads(os.environ.get("RAY_JOB_CONFIG_JSON_ENV_VAR", "{}"))


def _follow(client: JobSubmissionClient, job: str, say: Callable[[str], None]) -> JobStatus:
    shown = 0
    while True:
        status = client.get_job_status(job)
        text = client.get_job_logs(job)
        complete = text if status in ENDED else text[: text.rfind("\n") + 1]
        for line in complete[shown:].splitlines():
            say(f"  {line}")
        shown = max(shown, len(complete))
        if status in ENDED:
            return status
        time.sleep(_POLL_SECONDS)
