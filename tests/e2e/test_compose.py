"""Test the compose stack as users start it, on a real Docker engine; skipped without one.

It requires a program `docker compose`, or the path of one in COMPOSE."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import httpx
import pytest

import scorekit
from deploy import smoke
from scorekit.client import SyncScoringClient
from scorekit.retrieval.client import Retriever
from scorekit.schemas import Scored
from testing.servers import free_port
from tests.kits.docker.compose import PROGRAM, ROOT, ComposeProject, wait_for

pytestmark = pytest.mark.slow
SERVICES = ("metricx", "xcomet", "judge", "embedder", "retriever")
PORTS = {name: free_port() for name in SERVICES}
PROJECT = ComposeProject(
    "scorekit-test",
    TEACHER_PORT=str(free_port()),
    VLLM_API_KEY="key-of-the-teacher",
    **{f"{name.upper()}_PORT": str(port) for name, port in PORTS.items()},
)
ENVIRONMENT = PROJECT.environment
compose, inspect, kill, healthy = (
    PROJECT.compose,
    PROJECT.inspect,
    PROJECT.kill,
    PROJECT.is_healthy,
)
METRICX = f"http://127.0.0.1:{PORTS['metricx']}"
EMBEDDER = f"http://127.0.0.1:{PORTS['embedder']}"
RETRIEVER = f"http://127.0.0.1:{PORTS['retriever']}"
PAIRS = [
    {"src": f"Delete file {n} now.", "mt": f"지금 파일 {n}을(를) 삭제하십시오."} for n in range(400)
]


def stored(database: int) -> int:
    """Return the entries of a service's database in the cache's container."""
    asking = ("exec", "-T", "cache", "valkey-cli", "-n", str(database), "dbsize")
    return int(compose(*asking).split()[-1])


def ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health/ready").status_code == 200
    except httpx.TransportError:
        return False


@pytest.fixture(scope="module")
def stack() -> Iterator[None]:
    if PROGRAM is None:
        pytest.skip("no Docker engine with Compose v2 answers here: the stack is not tested")
    compose("--profile", "search", "build")
    compose("--profile", "search", "up", "--wait")
    yield
    compose("--profile", "*", "down", "--volumes", check=False)


def client() -> SyncScoringClient:
    return SyncScoringClient(METRICX, deadline_s=180.0)


def score(client: SyncScoringClient, pairs: list[dict[str, str]], cache: bool) -> list[float]:
    results = client.score(pairs, options={"cache": cache})
    assert all(isinstance(result, Scored) for result in results), results[:3]
    return [result.score for result in results]


class Load:
    """A client that scores the pairs repeatedly in a thread, and keeps every answer."""

    def __init__(self) -> None:
        self.answers: list[list[float]] = []
        self.errors: list[BaseException] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Load:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(300)
        assert not self._thread.is_alive()

    def _run(self) -> None:
        with client() as scoring:
            while not self._stop.is_set():
                try:
                    self.answers.append(score(scoring, PAIRS, cache=False))
                except BaseException as error:
                    self.errors.append(error)


@pytest.fixture(scope="module")
def expected(stack: None) -> list[float]:
    with client() as scoring:
        return score(scoring, PAIRS, cache=False)


@pytest.fixture(scope="module")
def smoke_result(stack: None) -> subprocess.CompletedProcess[str]:
    """Return the result of the smoke script for all services."""
    return subprocess.run(
        [sys.executable, "deploy/smoke.py", "--retriever", RETRIEVER],
        cwd=ROOT,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def test_each_service_scores_and_the_second_time_from_the_cache(
    smoke_result: subprocess.CompletedProcess[str],
) -> None:
    assert smoke_result.returncode == 0, smoke_result.stderr
    assert len(smoke_result.stdout.splitlines()) == len(SERVICES)


def test_each_service_says_its_version_and_logs_json_without_texts(
    smoke_result: subprocess.CompletedProcess[str],
) -> None:
    for service, port in PORTS.items():
        versions = httpx.get(f"http://127.0.0.1:{port}/v1/info").json()["versions"]
        assert versions["scorekit"] == scorekit.__version__, service
        command = ["docker", "logs", f"scorekit-test-{service}-1"]
        logs = subprocess.run(command, capture_output=True, check=True)
        written = (logs.stdout + logs.stderr).decode().splitlines()
        if service == "retriever":  # its output about reading pages is plain text
            written = written[[line.startswith("{") for line in written].index(True) :]
        lines = [json.loads(line) for line in written]
        assert {"ready", "request"} <= {line["event"] for line in lines}, service
        logged = json.dumps(lines, ensure_ascii=False)
        assert not [text for text in (smoke.SOURCE, smoke.GOOD, smoke.BAD) if text in logged]


def test_containers_are_locked_down(stack: None) -> None:
    for service in (*SERVICES, "cache"):
        container = inspect(service)
        assert container["Config"]["User"] not in ("", "root", "0"), service
        assert container["HostConfig"]["ReadonlyRootfs"], service
        assert container["HostConfig"]["CapDrop"] == ["ALL"], service
        assert container["HostConfig"]["Memory"] > 0, service
        assert container["HostConfig"]["RestartPolicy"]["Name"] == "unless-stopped", service
        published = [
            bind for binds in container["NetworkSettings"]["Ports"].values() for bind in binds or []
        ]
        assert all(bind["HostIp"] == "127.0.0.1" for bind in published), service
        assert bool(published) == (service != "cache"), service
        if service != "cache":
            assert container["HostConfig"]["Init"] is True
            assert container["Config"]["Image"] == f"scorekit-{service}:0.2.0"
    shell_output = compose("exec", "-T", "metricx", "sh", "-c", "id -u; touch /app/x 2>&1 || true")
    assert shell_output.splitlines()[0] == "10001" and "Read-only" in shell_output


def test_the_profile_teacher_adds_a_server_that_wants_its_key(stack: None) -> None:
    compose("--profile", "teacher", "up", "--wait", "--build", "teacher")
    url = f"http://127.0.0.1:{ENVIRONMENT['TEACHER_PORT']}/v1"
    assert httpx.get(f"{url}/models").status_code == 401
    key = {"Authorization": "Bearer key-of-the-teacher"}
    (model,) = httpx.get(f"{url}/models", headers=key).json()["data"]
    question = {"model": model["id"], "messages": [{"role": "user", "content": "Hi"}]}
    answer = httpx.post(f"{url}/chat/completions", headers=key, json=question, timeout=60)
    assert answer.json()["choices"][0]["message"]["content"]


def test_a_service_killed_under_load_is_back_by_itself_and_no_answer_is_wrong(
    expected: list[float],
) -> None:
    with Load() as load:
        wait_for(lambda: bool(load.answers))
        restarts = kill("metricx")
        wait_for(lambda: inspect("metricx")["RestartCount"] > restarts)
        after = len(load.answers)
        wait_for(lambda: len(load.answers) > after + 1)
    assert not load.errors
    for answer in load.answers:
        assert answer == pytest.approx(expected, abs=1e-4)
    wait_for(lambda: healthy("metricx"))


def test_the_embedder_serves_openais_sdk_and_after_a_kill_the_same_vectors(stack: None) -> None:
    import openai  # takes most of a second

    texts = [pair["mt"] for pair in PAIRS[:50]]
    asking = openai.OpenAI(base_url=f"{EMBEDDER}/v1", api_key="none")

    def vectors() -> list[list[float]]:
        rows = asking.embeddings.create(model="encoder", input=texts).data
        return [row.embedding for row in rows]

    def came_from_tier() -> bool:
        """Check the hits of the tier: memory is empty after the kill, so they came from the
        container."""
        metrics_text = httpx.get(f"{EMBEDDER}/metrics").text
        (num_hits,) = re.findall(r'scorekit_cache_hits_total\{tier="tier"\} (\S+)', metrics_text)
        return float(num_hits) >= len(texts)

    before = vectors()
    wait_for(lambda: stored(3) >= len(texts))
    restarts = kill("embedder")
    wait_for(lambda: inspect("embedder")["RestartCount"] > restarts)
    wait_for(lambda: ready(EMBEDDER))
    assert vectors() == before
    assert came_from_tier()
    wait_for(lambda: healthy("embedder"))


def test_the_retriever_killed_is_back_with_the_index_that_it_had(stack: None) -> None:
    with Retriever(RETRIEVER, deadline_s=180.0) as retriever:
        before = retriever.info(), retriever.search(["life expectancy", "인구"])
        restarts = kill("retriever")
        wait_for(lambda: inspect("retriever")["RestartCount"] > restarts)
        assert (retriever.info(), retriever.search(["life expectancy", "인구"])) == before
    wait_for(lambda: healthy("retriever"))


def test_without_its_cache_the_stack_goes_on_and_finds_it_again(expected: list[float]) -> None:
    with client() as scoring:
        assert score(scoring, PAIRS, cache=True) == pytest.approx(expected, abs=1e-4)
        wait_for(lambda: stored(0) > 0)
        compose("stop", "cache")
        for number in range(3):
            pairs = [pair | {"src": f"{number} {pair['src']}"} for pair in PAIRS[:20]]
            assert len(score(scoring, pairs, cache=True)) == 20
        compose("start", "cache")

        def is_rewritten() -> bool:
            """Check the entries: the cache keeps nothing on disk, so all were written after its
            start."""
            score(scoring, [{"src": f"{time.monotonic()}", "mt": "x"}], cache=True)
            return stored(0) > 0

        wait_for(is_rewritten)


def test_down_under_load_loses_nothing_and_keeps_the_grace_time(expected: list[float]) -> None:
    with Load() as load:
        wait_for(lambda: len(load.answers) > 0)
        compose("stop", "metricx")
        assert inspect("metricx")["State"]["ExitCode"] == 0  # 137: killed after the grace time
        compose("start", "metricx")
        after = len(load.answers)
        wait_for(lambda: len(load.answers) > after)
    assert not load.errors
    for answer in load.answers:
        assert answer == pytest.approx(expected, abs=1e-4)
    compose("--profile", "*", "down", "--volumes")
