"""A stage is submitted once, followed, skipped when done, and tried anew under the next number."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
from ray.job_submission import JobStatus

from pipeline.cluster import jobs
from pipeline.cluster.jobs import Stage, StageFailed, follow_stage


@dataclass
class FakeJob:
    submission_id: str
    status: JobStatus


@dataclass
class FakeClient:
    """Jobs end as told, and set the marker when they succeed."""

    ends_as: JobStatus = JobStatus.SUCCEEDED
    jobs: list[FakeJob] = field(default_factory=list)
    marker: list[bool] = field(default_factory=lambda: [False])
    submitted: list[dict[str, Any]] = field(default_factory=list)

    def list_jobs(self) -> list[FakeJob]:
        return self.jobs

    def submit_job(self, **fields: Any) -> None:
        self.submitted.append(fields)
        self.jobs.append(FakeJob(fields["submission_id"], JobStatus.RUNNING))

    def get_job_status(self, job: str) -> JobStatus:
        (found,) = [j for j in self.jobs if j.submission_id == job]
        found.status = self.ends_as
        self.marker[0] = self.marker[0] or self.ends_as is JobStatus.SUCCEEDED
        return found.status

    def get_job_logs(self, job: str) -> str:
        return "one line\nanother"


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "_POLL_SECONDS", 0.0)


def follow(client: FakeClient, said: list[str]) -> None:
    stage = Stage(name="private", entrypoint="python x", is_done=lambda: client.marker[0])
    follow_stage(
        client,  # type: ignore[arg-type]
        "demo",
        stage,
        runtime_env={},
        metadata={"recipe_digest": "d"},
        say=said.append,
    )


def test_submitted_once_and_skipped_when_done() -> None:
    client, said = FakeClient(), []
    follow(client, said)
    follow(client, said)
    assert [s["submission_id"] for s in client.submitted] == ["demo-private-0"]
    assert client.submitted[0]["metadata"] == {
        "recipe_digest": "d",
        "run": "demo",
        "stage": "private",
    }
    assert said[1:3] == ["  one line", "  another"] and said[-1] == "private: done"


def test_a_running_job_is_followed_and_not_submitted_again() -> None:
    client, said = FakeClient(jobs=[FakeJob("demo-private-3", JobStatus.RUNNING)]), []
    follow(client, said)
    assert not client.submitted and "demo-private-3 is running already" in said[0]


def test_a_failed_job_is_tried_under_the_next_number() -> None:
    client, said = FakeClient(ends_as=JobStatus.FAILED), []
    for _ in range(2):
        with pytest.raises(StageFailed, match="ray job logs demo-private-"):
            follow(client, said)
    names = [s["submission_id"] for s in client.submitted]
    assert names == ["demo-private-0", "demo-private-1"]


def test_the_marker_rules_over_the_job_record() -> None:
    """Ray's records die with the head: without its marker a succeeded job counts for nothing."""
    client, said = FakeClient(jobs=[FakeJob("demo-private-0", JobStatus.SUCCEEDED)]), []
    client.marker = [True]
    follow(client, said)
    assert not client.submitted
    client.marker = [False]
    follow(client, said)
    assert [s["submission_id"] for s in client.submitted] == ["demo-private-1"]


def test_names_of_other_runs_are_not_mistaken() -> None:
    other = FakeJob("demo-private-again-0", JobStatus.RUNNING)
    client, said = FakeClient(jobs=[other]), []
    follow(client, said)
    assert [s["submission_id"] for s in client.submitted] == ["demo-private-0"]
