"""The chain sent to a cluster by name: once, with what it needs, and nothing that cannot work."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from ray.job_submission import JobStatus
from small_recipe import write_small_recipe

from pipeline.chain.status import affordable_restarts
from pipeline.cluster import submission
from pipeline.cluster.submission import ClusterError, cancel_run, open_client, submit_chain
from pipeline.privacy.mechanism import Mechanism
from pipeline.recipe import Recipe, load_recipe

ADDRESS = "http://127.0.0.1:8265"


class Job:
    def __init__(self, name: str, status: JobStatus, metadata: dict[str, str]) -> None:
        self.submission_id, self.status, self.metadata = name, status, metadata
        self.start_time = 0


class Client:
    """A job API that, as Ray's, refuses an id it knows."""

    def __init__(self) -> None:
        self.jobs: list[Job] = []
        self.sent: list[dict[str, Any]] = []
        self.stopped: list[str] = []
        self.is_late = False

    def list_jobs(self) -> list[Job]:
        if self.is_late:  # another submission comes between the question and the submission
            self.is_late = False
            return []
        return list(self.jobs)

    def submit_job(self, **fields: Any) -> None:
        name = fields["submission_id"]
        if any(job.submission_id == name for job in self.jobs):
            raise RuntimeError(f"Request failed with status code 500: {name} exists")
        folder = Path(fields["runtime_env"]["working_dir"])
        files = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
        self.sent.append({**fields, "files": files, "text": (folder / "recipe.yaml").read_text()})
        self.jobs.append(Job(name, JobStatus.RUNNING, fields["metadata"]))

    def get_job_status(self, name: str) -> JobStatus:
        return next(job.status for job in self.jobs if job.submission_id == name)

    def stop_job(self, name: str) -> None:
        self.stopped.append(name)
        next(job for job in self.jobs if job.submission_id == name).status = JobStatus.STOPPED


@pytest.fixture
def recipe(tmp_path: Path) -> Recipe:
    return load_recipe(write_small_recipe(tmp_path))


@pytest.fixture(autouse=True)
def one_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(submission, "_node_addresses", lambda address: ["127.0.0.1"])


def submit(client: Client, recipe: Recipe, **options: Any) -> submission.Submitted:
    options = {"has_shared_paths": False, **options}
    return submit_chain(client, ADDRESS, recipe, **options)  # type: ignore[arg-type]


def test_two_submissions_are_one_chain(recipe: Recipe) -> None:
    client = Client()
    assert submit(client, recipe) == submission.Submitted(job="small-chain-0", is_attached=False)
    assert submit(client, recipe).is_attached
    client.is_late = True
    assert submit(client, recipe) == submission.Submitted(job="small-chain-0", is_attached=True)
    assert len(client.sent) == 1
    client.jobs[0].status = JobStatus.FAILED
    assert submit(client, recipe).job == "small-chain-1"


def test_code_and_resolved_recipe_travel(recipe: Recipe, tmp_path: Path) -> None:
    client = Client()
    submit(client, recipe)
    (sent,) = client.sent
    assert {"recipe.yaml", "jobs/chain.py", "pipeline/cli.py"} <= sent["files"]
    assert not any("__pycache__" in name or name.startswith(".") for name in sent["files"])
    assert str(tmp_path / "storage") in sent["text"]
    assert sent["metadata"]["recipe_digest"] == recipe.digest()
    assert sent["entrypoint"] == "python jobs/chain.py recipe.yaml"


def test_too_much_is_not_sent(recipe: Recipe, tmp_path: Path) -> None:
    for name in ("pipeline", "jobs"):
        (tmp_path / "code" / name).mkdir(parents=True)
    (tmp_path / "code" / "jobs" / "chain.py").write_text("")
    (tmp_path / "code" / "jobs" / "weights.bin").write_bytes(bytes(6_000_000))
    client = Client()
    with pytest.raises(ClusterError, match=r"6.0 MB, and at most 5 MB .*weights.bin \(6.0 MB\)"):
        submit(client, recipe, origin=tmp_path / "code")
    assert not client.sent


def test_another_recipe_under_a_running_name_is_refused(recipe: Recipe) -> None:
    client = Client()
    submit(client, recipe)
    other = recipe.model_copy(update={"seed": 3})
    with pytest.raises(ClusterError, match=r"under way by another recipe .*small-chain-0"):
        submit(client, other)


def test_paths_that_other_machines_do_not_see_are_refused(
    recipe: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = ["127.0.0.1", "192.0.2.7"]
    monkeypatch.setattr(submission, "_node_addresses", lambda address: nodes)
    client = Client()
    with pytest.raises(ClusterError, match=r"storage is .*data.private.source.*192.0.2.7"):
        submit(client, recipe)
    assert not client.sent
    submit(client, recipe, has_shared_paths=True)
    assert client.sent[0]["runtime_env"]["env_vars"] == {"DP_PRETRAIN_SHARED_PATHS": "1"}


def test_cancel_stops_the_chain_before_its_stage(recipe: Recipe) -> None:
    client = Client()
    told = {"run": "small-2", "asked_as": "small", "stage": "private"}
    client.jobs.append(Job("small-2-private-0", JobStatus.RUNNING, told))
    client.jobs.append(Job("small-2-warmup-0", JobStatus.SUCCEEDED, told))
    client.jobs.append(Job("other-chain-0", JobStatus.RUNNING, {"run": "other"}))
    submit(client, recipe)
    ended = cancel_run(client, "small")  # type: ignore[arg-type]
    assert client.stopped == ["small-chain-0", "small-2-private-0"]
    assert set(ended.values()) == {JobStatus.STOPPED}
    with pytest.raises(ClusterError, match=r"no job of it; runs it knows: .*'other', 'small'"):
        cancel_run(client, "unknown")  # type: ignore[arg-type]


@pytest.fixture
def dashboard(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, dict[str, Any]]]:
    """A server that answers as a Ray dashboard may, and how it answers."""
    answers = {"status": 401, "version": "2.60.0"}

    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(answers["status"])
            self.end_headers()
            is_version = self.path.endswith("version")
            text = '{"ray_version": "%s", "version": "4"}' % answers["version"]  # noqa: UP031
            self.wfile.write(text.encode() if is_version else b"[]")

        def log_message(self, *words: Any) -> None:
            pass

    for name in ("RAY_API_SERVER_ADDRESS", "RAY_ADDRESS", "RAY_AUTH_MODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.delenv(submission.OPEN_CLUSTER, raising=False)
    server = HTTPServer(("127.0.0.1", 0), Answer)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", answers
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.parametrize(
    ("status", "version", "message"),
    [
        (401, "2.60.0", "did not take this caller's token: export RAY_AUTH_MODE=token"),
        (200, "2.60.0", "takes jobs from anybody who reaches it"),
        (404, "2.60.0", "no Ray dashboard"),
    ],
)
def test_clusters_that_cannot_be_used_are_named(
    dashboard: tuple[str, dict[str, Any]], status: int, version: str, message: str
) -> None:
    address, answers = dashboard
    answers.update(status=status, version=version)
    with pytest.raises(ClusterError, match=message):
        open_client(address)


def test_an_old_ray_is_named(
    dashboard: tuple[str, dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    address, answers = dashboard
    answers.update(status=200, version="2.9.3")
    monkeypatch.setenv(submission.OPEN_CLUSTER, "1")
    with pytest.raises(ClusterError, match=r"runs Ray 2.9.3; this program needs Ray 2.50"):
        open_client(address)
    answers.update(version="2.60.0")
    open_client(address)


@pytest.mark.parametrize("address", ["127.0.0.1:8265", "ray://head:10001", "auto"])
def test_what_is_no_dashboard_address_is_named(
    monkeypatch: pytest.MonkeyPatch, address: str
) -> None:
    for name in ("RAY_API_SERVER_ADDRESS", "RAY_ADDRESS"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ClusterError, match="it must be the dashboard's address"):
        open_client(address)
    with pytest.raises(ClusterError, match="nothing answers there"):
        open_client("http://127.0.0.1:1")
    monkeypatch.setenv("RAY_ADDRESS", "http://elsewhere:8265")
    with pytest.raises(ClusterError, match="unset RAY_ADDRESS"):
        open_client(ADDRESS)


def test_affordable_restarts_count_what_the_reserve_still_pays(recipe: Recipe) -> None:
    phase = recipe.phase("private")  # 8 steps, a checkpoint every 2
    mechanism = Mechanism(
        num_records=200,
        expected_batch_size=20,
        sampling_probability=0.1,
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        num_steps=8,
        reserve_steps=9,
        delta=1e-3,
    )
    assert affordable_restarts(mechanism, phase, 4, 4) == 2
    assert affordable_restarts(mechanism, phase, 4, 6) == 1
    assert affordable_restarts(mechanism, phase, 4, 13) == 0
