"""Test the services on a Ray cluster of this machine: replicas, their deaths, updates, overload."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection
from pathlib import Path

import httpx
import pytest
from pydantic_core import to_json

from scorekit.client import Embeddings, SyncScoringClient
from scorekit.server.fake import FakeBackend
from scorekit.server.local import LocalScorer
from services.embedder.endpoint import EmbedOptions
from services.embedder.model import EmbedderBackend
from services.metricx.model import MetricXBackend
from testing.load import distinct_samples, expected_scores
from testing.pairs import read_pairs
from testing.ray_serve import start_serve
from testing.servers import PATIENCE_S, free_port, running_service, wait_until
from tests.kits.metricx_checkpoints import FLOAT32

pytestmark = pytest.mark.slow
ENCODER = Path(__file__).parents[3] / "demo/models/encoder"
RUN = f"{os.getpid()}"  # in the names of the applications, so that their processes are ours


class Cluster:
    """A running Serve instance for one application after another."""

    def __init__(self, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"

    def deploy(self, name, args, *, app="fake", cpus=0.1, **options):
        """Deploy or update an application, and return its URL when it is healthy."""
        from ray import serve

        from deploy.ray import apps

        options = {"num_replicas": 2, "graceful_shutdown_wait_loop_s": 0.2} | options
        scorer = apps.Scorer.options(ray_actor_options={"num_cpus": cpus}, **options)
        bound = scorer.bind(app, {"no_auth": True} | args)
        serve.run(bound, name=f"{name}-{RUN}", route_prefix=f"/{name}")
        return f"{self.url}/{name}"


@pytest.fixture(scope="module")
def cluster():
    import ray
    from ray import serve

    port = free_port()
    start_serve(http_options={"host": "127.0.0.1", "port": port, "request_timeout_s": 900})
    yield Cluster(port)
    serve.shutdown()
    ray.shutdown()


@pytest.fixture
def deploy(cluster):
    """Yield `Cluster.deploy`, and delete what a test has deployed."""
    from ray import serve

    names = set()

    def run(name, args, **options):
        names.add(name)
        return cluster.deploy(name, args, **options)

    yield run
    for name in names:
        serve.delete(f"{name}-{RUN}")


def replicas(name):
    """Return the process ids of an application's replicas."""
    title = f"ray::ServeReplica:{name}-{RUN}:"
    process_ids = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if (process / "cmdline").read_bytes().startswith(title.encode()):
                process_ids.append(int(process.name))
    return process_ids


def metric(url, name):
    """Return the metric of one replica, as the proxy chooses."""
    lines = httpx.get(f"{url}/metrics").text.splitlines()
    return next((float(line.split()[-1]) for line in lines if line.startswith(f"{name} ")), 0.0)


def test_answers_are_those_of_the_plain_service(deploy):
    url = deploy("same", {"service": "xcomet"})
    bad = [{"src": "bad", "mt": "nan"}, {"src": "x " * 600, "mt": "y"}]
    samples = [s | {"id": f"{index}"} for index, s in enumerate(distinct_samples(300) + bad)]
    bodies = [
        {"samples": samples, "options": {"cache": False, "overlong": "error"}},
        {"samples": [{"src": "no translation"}]},
        {"samples": samples, "options": {"nothing": 1}},
    ]
    with running_service(FakeBackend("xcomet")) as plain:
        for body in bodies:
            ray_answer, plain_answer = (
                httpx.post(f"{base_url}/v1/score", json=body) for base_url in (url, plain)
            )
            assert (ray_answer.status_code, ray_answer.json()) == (
                plain_answer.status_code,
                plain_answer.json(),
            )
        lines = [
            httpx.post(f"{base_url}/v1/score/stream", json=bodies[0]).text.splitlines()
            for base_url in (url, plain)
        ]
        assert sorted(lines[0]) == sorted(lines[1]) and len(lines[0]) == len(samples) + 1
        with SyncScoringClient(url) as client, SyncScoringClient(plain) as other:
            assert client.score(samples) == other.score(samples)


def test_metricx_gives_the_scores_that_it_gives_in_process(deploy, metricx_folder):
    args = {"model": str(metricx_folder), "device": "cpu", "threads": 1}
    url = deploy("metricx", args, app="metricx")
    pairs = read_pairs(40)
    expected = LocalScorer(MetricXBackend(str(metricx_folder), device="cpu", threads=1))
    with SyncScoringClient(url, batch_size=10) as client:
        scores = [result.score for result in client.score(pairs)]
    assert scores == pytest.approx(expected.score_batch(pairs).sequence_scores, abs=FLOAT32)


def test_the_embedder_gives_the_vectors_that_it_gives_in_process(deploy):
    args = {"model": str(ENCODER), "device": "cpu", "threads": 1}
    url = deploy("embedder", args, app="embedder", num_replicas=1)
    texts = ["Hello.", "안녕하세요."]
    backend = EmbedderBackend(**args)
    backend.load()
    expected = backend.forward(backend.encode(texts, EmbedOptions(False, "")))
    with Embeddings(url) as client:
        assert client.info().dimension == len(expected[0]["embedding"])
        for got, outcome in zip(client.embed(texts), expected, strict=True):
            assert got == pytest.approx(outcome["embedding"].tolist(), abs=1e-5)


def test_a_request_of_many_samples_goes_whole_to_one_replica(deploy):
    url = deploy("whole", {})
    samples = distinct_samples(3000)
    answer = httpx.post(f"{url}/v1/score", json={"samples": samples}, timeout=PATIENCE_S).json()
    assert [r["score"] for r in answer["results"]] == expected_scores(samples)
    counts: set[float] = set()
    name = 'scorekit_samples_total{outcome="ok"}'
    wait_until(lambda: counts.add(metric(url, name)) or len(counts) > 1)
    assert counts == {0.0, 3000.0}


def test_keys_are_checked_and_health_is_open(deploy, tmp_path):
    (tmp_path / "keys").write_text("right\n")
    (tmp_path / "keys").chmod(0o600)
    url = deploy(
        "keys", {"no_auth": False, "api_keys_file": f"{tmp_path / 'keys'}"}, num_replicas=1
    )
    body = {"samples": [{"src": "a", "mt": "b"}]}
    refused = httpx.post(f"{url}/v1/score", json=body)
    assert refused.status_code == 401 and refused.json()["error"]["type"] == "unauthorized"
    assert httpx.get(f"{url}/metrics").status_code == 401
    assert httpx.get(f"{url}/health/ready").json() == {"ready": True}
    right = {"Authorization": "Bearer right"}
    assert httpx.post(f"{url}/v1/score", json=body, headers=right).status_code == 200


def test_an_answer_carries_its_request_id_once(deploy):
    url = deploy("id", {}, num_replicas=1)
    response = httpx.get(f"{url}/v1/info", headers={"X-Request-Id": "mine"})
    assert response.headers.get_list("x-request-id") == ["mine"]
    assert len(httpx.get(f"{url}/v1/info").headers.get_list("x-request-id")) == 1


@pytest.mark.parametrize("route", ["score", "score/stream"])
def test_the_work_of_a_client_that_leaves_is_given_up(deploy, route):
    url = deploy("leave", {"seconds_per_batch": 0.5}, num_replicas=1)
    client = HTTPConnection(url.split("/")[2])
    body = to_json({"samples": distinct_samples(2000)})
    client.request("POST", f"/leave/v1/{route}", body, {"Content-Type": "application/json"})
    wait_until(lambda: metric(url, "scorekit_queue_items") > 1000)
    client.close()
    wait_until(lambda: metric(url, "scorekit_queue_items") == 0)
    assert metric(url, 'scorekit_samples_total{outcome="cancelled"}') > 1000
    if route == "score":
        refused = 'scorekit_requests_total{route="/v1/score",status="499"}'
        assert metric(url, refused) == 1


def test_what_is_too_much_gets_429_with_retry_after_and_the_rest_its_answer(deploy):
    url = deploy(
        "full",
        {"seconds_per_batch": 1.0},
        num_replicas=1,
        max_ongoing_requests=2,
        max_queued_requests=2,
    )

    def ask(number):
        samples = distinct_samples(1, number)
        return samples, httpx.post(f"{url}/v1/score", json={"samples": samples}, timeout=PATIENCE_S)

    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(ask, range(8)))
    refused = [answer for _, answer in answers if answer.status_code != 200]
    assert 2 <= len(refused) <= 6  # a waiting request that the replica just gets counts twice
    assert {(r.status_code, r.headers["retry-after"]) for r in refused} == {(429, "1")}
    for samples, answer in answers:
        if answer.status_code == 200:
            assert [r["score"] for r in answer.json()["results"]] == expected_scores(samples)
    # The client retries until it has everything.
    samples = distinct_samples(8, 100)
    with SyncScoringClient(url, batch_size=1) as client:
        assert [r.score for r in client.score(samples)] == expected_scores(samples)


class Load:
    """Run callers of the client until the block ends; every answer is compared with the truth."""

    def __init__(self, url, callers=4):
        self.url, self.stop, self.num_samples, self.errors = url, False, 0, []
        self.threads = [threading.Thread(target=self._run, args=(n,)) for n in range(callers)]

    def _run(self, number):
        start = number * 10**7
        try:
            with SyncScoringClient(self.url, deadline_s=120) as client:
                while not self.stop:
                    samples = distinct_samples(20, start)
                    start += 20
                    assert [r.score for r in client.score(samples)] == expected_scores(samples)
                    self.num_samples += 20
        except Exception as error:
            self.errors.append(error)

    def wait_for(self, more):
        """Wait until that many more samples were answered."""
        target = self.num_samples + more
        wait_until(lambda: self.errors or self.num_samples >= target, 120)
        assert not self.errors

    def __enter__(self):
        [thread.start() for thread in self.threads]
        self.wait_for(100)
        return self

    def __exit__(self, *_):
        self.stop = True
        [thread.join() for thread in self.threads]
        assert not self.errors


def test_replicas_killed_under_load_lose_nothing(deploy):
    url = deploy("kill", {"seconds_per_pair": 0.01}, health_check_period_s=1)
    for _ in range(3):
        with Load(url) as load:
            before = replicas("kill")
            os.kill(before[0], signal.SIGKILL)
            load.wait_for(200)
            wait_until(lambda: len(set(replicas("kill")) - {before[0]}) == 2, 120)  # noqa: B023
            load.wait_for(200)


def test_a_rolling_update_under_load_loses_nothing(deploy):
    url = deploy("update", {"seconds_per_pair": 0.01})
    before = set(replicas("update"))
    with Load(url) as load:
        deploy("update", {"seconds_per_pair": 0.011})
        load.wait_for(200)
    assert len(before) == 2 and not before & set(replicas("update"))


def test_accepted_requests_are_answered_when_an_application_is_deleted(deploy):
    from ray import serve

    url = deploy("drain", {"seconds_per_batch": 2.0}, num_replicas=1)
    samples = distinct_samples(3)
    with ThreadPoolExecutor(1) as pool:
        body = {"samples": samples}
        pending = pool.submit(httpx.post, f"{url}/v1/score", json=body, timeout=PATIENCE_S)
        wait_until(lambda: metric(url, "scorekit_queue_items") > 0)
        serve.delete(f"drain-{RUN}")
        answer = pending.result()
    assert [r["score"] for r in answer.json()["results"]] == expected_scores(samples)


def test_a_replica_that_hangs_is_replaced(deploy):
    checks = {"health_check_period_s": 0.5, "health_check_timeout_s": 2}
    args = {"seconds_per_batch": 0.1, "stall_after": 5.0}
    url = deploy("hang", args, num_replicas=1, graceful_shutdown_timeout_s=1, **checks)
    (before,) = replicas("hang")
    os.kill(before, signal.SIGSTOP)
    wait_until(lambda: set(replicas("hang")) - {before}, 120)
    with SyncScoringClient(url) as client:
        assert client.score([{"src": "a", "mt": "b"}])[0].ok


def test_a_model_that_cannot_be_loaded_fails_the_deployment_by_its_line(deploy, tmp_path):
    from ray import serve

    with pytest.raises(RuntimeError, match="absent"):
        deploy("absent", {"model": f"{tmp_path}"}, app="metricx", num_replicas=1)
    message = serve.status().applications[f"absent-{RUN}"].deployments["Scorer"].message
    assert f"UserError: {tmp_path}" in message
