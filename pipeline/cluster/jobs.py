"""One stage of a chain as its own Ray job: submitted once, followed, and never run twice."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ray.job_submission import JobStatus, JobSubmissionClient

_POLL_SECONDS = 2.0
_ENDED = (JobStatus.SUCCEEDED, JobStatus.FAILED, JobStatus.STOPPED)


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
    prefix = f"{run}-{stage.name}-"
    jobs = {job.submission_id: job.status for job in client.list_jobs() if job.submission_id}
    mine = {job: s for job, s in jobs.items() if job.startswith(prefix) and _number(job, prefix)}
    running = [job for job, status in mine.items() if status not in _ENDED]
    if running:
        job = running[0]
        say(f"{stage.name}: job {job} is running already; following it")
    elif stage.is_done():
        say(f"{stage.name}: done")
        return
    else:
        job = f"{prefix}{len(mine)}"
        client.submit_job(
            entrypoint=stage.entrypoint,
            submission_id=job,
            runtime_env=dict(runtime_env),
            metadata={**metadata, "stage": stage.name},
        )
        say(f"{stage.name}: submitted as job {job}")
    status = _follow(client, job, say)
    if not stage.is_done():
        raise StageFailed(
            f"{stage.name}: job {job} ended as {status} and left no result; see "
            f"`ray job logs {job}`. The same command tries again from where it stopped"
        )


def parent_runtime_env() -> dict[str, Any]:
    """The working_dir of the job this process runs in, so that child jobs have the same code."""
    config = json.loads(os.environ.get("RAY_JOB_CONFIG_JSON_ENV_VAR", "{}"))
    working_dir = config.get("runtime_env", {}).get("working_dir")
    return {"working_dir": working_dir} if working_dir else {}


def _number(job: str, prefix: str) -> bool:
    return job[len(prefix) :].isdigit()


def _follow(client: JobSubmissionClient, job: str, say: Callable[[str], None]) -> JobStatus:
    shown = 0
    while True:
        status = client.get_job_status(job)
        text = client.get_job_logs(job)
        complete = text if status in _ENDED else text[: text.rfind("\n") + 1]
        for line in complete[shown:].splitlines():
            say(f"  {line}")
        shown = max(shown, len(complete))
        if status in _ENDED:
            return status
        time.sleep(_POLL_SECONDS)
