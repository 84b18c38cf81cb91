"""Check the Ray applications: their config, settings and a replica without Ray."""

from __future__ import annotations

import asyncio
import re
import threading
from pathlib import Path

import httpx
import pytest
import yaml
from ray.serve.schema import ServeDeploySchema

from deploy.ray import apps
from scorekit.errors import UserError

ROOT = Path(__file__).parents[3]
CONFIG = yaml.safe_load((ROOT / "deploy/ray/serve.yaml").read_text())
RAY_SERVICE = yaml.safe_load_all((ROOT / "deploy/k8s/rayservice.yaml").read_text())
KUBERAY = yaml.safe_load(
    next(manifest for manifest in RAY_SERVICE if manifest["kind"] == "RayService")["spec"][
        "serveConfigV2"
    ]
)


@pytest.mark.parametrize("config", [CONFIG, KUBERAY], ids=["serve.yaml", "rayservice.yaml"])
def test_the_config_is_one_that_serve_deploy_takes(config):
    checked = ServeDeploySchema.model_validate(config)
    names = ["metricx", "xcomet", "judge", "embedder", "reward_model"]
    if config is CONFIG:
        # KubeRay waits for all applications: one without an index would block it.
        names += ["retriever"]
    assert [app.route_prefix for app in checked.applications] == [f"/{name}" for name in names]
    for app in checked.applications:
        module, name = app.import_path.split(":")
        assert module == apps.__name__
        # Builds the application, which checks its settings.
        assert getattr(apps, name)(app.args)._bound_deployment.name == app.deployments[0].name
        assert app.deployments[0].max_queued_requests > 0
        gpus = (app.deployments[0].ray_actor_options.num_gpus or 0) > 0
        assert gpus == (app.name not in ("judge", "retriever")), (
            "Ray hides the GPUs from a replica that asks for none"
        )


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"seconds_per_par": 1}, "fake: args: unknown setting 'seconds_per_par'"),
        ({"port": 8001}, "fake: args: unknown setting 'port'"),
        ({"max_samples": 0}, "fake: args: max_samples: Input should be greater"),
        ({"max_samples": None}, "fake: args: max_samples: Input should be a valid integer"),
    ],
)
def test_wrong_settings_are_named_before_anything_is_deployed(args, message):
    with pytest.raises(UserError, match=re.escape(message)):
        apps.fake(args)


def test_settings_come_from_args_then_the_environment(monkeypatch):
    monkeypatch.setenv("FAKE_MAX_SAMPLES", "7")
    monkeypatch.setenv("FAKE_MAX_FIELD_CHARS", "70")
    settings = apps.make_settings("fake", {"max_samples": 5})
    assert (settings.max_samples, settings.max_field_chars) == (5, 70)


def test_replicas_do_not_share_a_file_as_their_cache(monkeypatch):
    assert apps.make_settings("fake", {}).cache == "memory"
    assert apps.make_settings("fake", {"cache": "sqlite:///x"}).cache == "sqlite:///x"
    monkeypatch.setenv("FAKE_CACHE", "redis://cache:6379/0")
    assert apps.make_settings("fake", {}).cache == "redis://cache:6379/0"


@pytest.fixture
def replica(monkeypatch):
    """Return a function that makes a replica of the fake without changing logs or collector."""
    monkeypatch.setattr("scorekit.server.run.prepare_process", lambda log_level: None)
    written = apps.Scorer.func_or_class.__mro__[1]  # without Ray's wrapper

    async def make(**args):
        scorer = written.__new__(written)
        await scorer.__init__("fake", args)
        return scorer

    return make


def test_a_replica_without_keys_does_not_start_unless_it_is_told_to(replica):
    with pytest.raises(UserError, match="SCOREKIT_API_KEYS"):
        asyncio.run(replica())


def test_a_replica_whose_model_hangs_is_unhealthy(replica):
    async def hang():
        scorer = await replica(no_auth=True, stall_after=0.2)
        app = scorer.__serve_build_asgi_app__()
        service = app.state.service
        await scorer.check_health()
        go, forward = threading.Event(), service.backend.forward
        service.backend.forward = lambda batch: go.wait(180) and forward(batch)
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as http:
            body = {"samples": [{"src": "a", "mt": "b"}]}
            request = asyncio.create_task(http.post("/v1/score", json=body))
            async with asyncio.timeout(180):
                while service.unavailable_reason() is None:
                    await asyncio.sleep(0.01)
            with pytest.raises(RuntimeError, match="the model hangs in a batch"):
                await scorer.check_health()
            go.set()
            assert (await request).status_code == 200
        await service.close()

    asyncio.run(hang())
