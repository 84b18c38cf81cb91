"""Test the profile `train` as users start it, on a real Docker engine; skipped without one.

One image has a real vLLM in it: 3 GB, and minutes to build."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest

from testing.servers import free_port
from tests.kits.docker.compose import PROGRAM, ComposeProject, wait_for

pytestmark = pytest.mark.slow
PROJECT = ComposeProject(
    "scorekit-train-test",
    METRICX_PORT=str(free_port()),
    XCOMET_PORT=str(free_port()),
    VLLM_API_KEY="key-of-the-samplers",
)
TRAINER = f"{PROJECT.name}-run"
CALLED = ("metricx", "xcomet", "sampler-1", "sampler-2")
SMALL_RUN = ["rl.batch_size=8", "rl.warmup_updates=0", "misc.save_every_n_updates=2"]
#: Seconds for a few updates, or for a vLLM that starts, on 2 cores that much else keeps busy.
LONG_S = 900.0


def docker(*arguments: str) -> str:
    """Return what a command of docker prints."""
    done = subprocess.run(["docker", *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@pytest.fixture(scope="module")
def stack() -> Iterator[None]:
    if PROGRAM is None:
        pytest.skip("no Docker engine with Compose v2 answers here: the profile is not tested")
    PROJECT.compose("--profile", "train", "build", "trainer", *CALLED)
    PROJECT.compose("--profile", "train", "up", "--wait", *CALLED)
    yield
    subprocess.run(["docker", "rm", "--force", TRAINER], capture_output=True, check=False)
    PROJECT.compose("--profile", "*", "down", "--volumes", check=False)


def start_trainer(num_updates: int) -> None:
    """Start or resume the run of the example, shortened to so many updates."""
    subprocess.run(["docker", "rm", "--force", TRAINER], capture_output=True, check=False)
    sets = [*SMALL_RUN, f"rl.num_updates={num_updates}"]
    config = ("--config", "configs/translation/compose.yaml", "--resume", "--limit", "40")
    overrides = [word for text in sets for word in ("--set", text)]
    run = ("--profile", "train", "run", "-d", "--no-deps", "--name", TRAINER, "trainer", "train")
    PROJECT.compose(*run, *config, *overrides)


def exit_code() -> int:
    """Wait for the end of the run, and return its exit code."""
    wait_for(lambda: docker("inspect", "-f", "{{.State.Running}}", TRAINER) == "false\n", LONG_S)
    return int(docker("inspect", "-f", "{{.State.ExitCode}}", TRAINER))


def log_rows() -> list[dict[str, Any]]:
    """Return the lines of log.jsonl; read by another container, so also after the run."""
    read = ("--rm", "--no-deps", "--entrypoint", "sh", "trainer", "-c")
    text = PROJECT.compose(
        "--profile", "train", "run", *read, "cat /runs/translation/log.jsonl 2>/dev/null || true"
    )
    return [json.loads(line) for line in text.splitlines()]


def status_of(service: str, path: str, key: str) -> str:
    """Return the HTTP status of sampler-1 as a container sees it, or the name of the error."""
    code = (
        "import http.client as h, sys\n"
        "c = h.HTTPConnection('sampler-1', 8000, timeout=5)\n"
        "try:\n"
        " c.request('GET', sys.argv[1], headers={'Authorization': 'Bearer ' + sys.argv[2]})\n"
        " print(c.getresponse().status)\n"
        "except OSError as error: print(type(error).__name__)"
    )
    command = ("run", "--rm", "--no-deps", "--entrypoint", "python", service, "-c", code, path, key)
    return PROJECT.compose("--profile", "train", *command).strip()


def test_only_the_trainer_reaches_a_sampler_and_needs_the_key(stack: None) -> None:
    for service in ("sampler-1", "sampler-2"):
        container = PROJECT.inspect(service)
        assert container["Config"]["User"] == "app"
        assert container["HostConfig"]["ReadonlyRootfs"]
        assert container["HostConfig"]["CapDrop"] == ["ALL"]
        assert container["HostConfig"]["Memory"] > 0
        assert not [bind for bind in container["NetworkSettings"]["Ports"].values() if bind]
    key = PROJECT.environment["VLLM_API_KEY"]
    assert status_of("trainer", "/v1/models", key) == "200"
    assert status_of("trainer", "/v1/models", "another") == "401"
    assert status_of("trainer", "/collective_rpc", key) == "404"  # dev mode is off
    assert status_of("metricx", "/health", key) == "gaierror"


def test_a_run_goes_on_when_a_sampler_is_killed_and_resumes_when_it_has_ended(stack: None) -> None:
    start_trainer(6)
    wait_for(lambda: len(log_rows()) >= 2, LONG_S)
    restarts = PROJECT.kill("sampler-1")
    assert exit_code() == 0, docker("logs", "--tail", "50", TRAINER)
    rows = log_rows()
    assert [row["update"] for row in rows] == [*range(1, 7)]
    assert all(row["reward_coverage"] == 1.0 and not row["skipped"] for row in rows)
    assert PROJECT.inspect("sampler-1")["RestartCount"] > restarts
    wait_for(lambda: PROJECT.is_healthy("sampler-1"), LONG_S)
    start_trainer(8)
    assert exit_code() == 0, docker("logs", "--tail", "50", TRAINER)
    assert log_rows()[:6] == rows
    assert [row["update"] for row in log_rows()] == [*range(1, 9)]
