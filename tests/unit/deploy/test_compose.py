"""Check the compose files against the services' settings, .env.example and the folders."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from scorekit.__main__ import DEFAULT_MODELS
from scorekit.server.settings import Secrets, load_api_keys, parse_settings
from services.embedder.settings import EmbedderSettings
from services.judge.settings import JudgeSettings, UpstreamSecrets
from services.metricx.settings import MetricXSettings
from services.retriever.settings import RetrieverSettings
from services.reward_model.settings import RewardModelSettings
from services.xcomet.settings import XCometSettings

ROOT = Path(__file__).parents[3]
SETTINGS = {
    "metricx": MetricXSettings,
    "xcomet": XCometSettings,
    "judge": JudgeSettings,
    "embedder": EmbedderSettings,
    "retriever": RetrieverSettings,
    "reward-model": RewardModelSettings,
}
#: Services that a profile starts.
PROFILE_SERVICES = {"retriever", "reward-model"}
#: Containers that nobody calls from outside: the cache, and those of the profile `train`.
UNPUBLISHED = {"cache", "sampler-1", "sampler-2", "trainer", "train-volumes"}
FILES = {name: (ROOT / name).read_text() for name in ("docker-compose.yml", "compose.gpu.yml")}
EXAMPLE = (ROOT / ".env.example").read_text()
_VARIABLE = re.compile(r"\$\{(\w+)(?::([-?])([^}]*))?\}")


class Loader(yaml.SafeLoader):
    """Loads Compose's tags: `!override` as the tagged value, `!reset` as None."""


Loader.add_constructor("!override", lambda loader, node: loader.construct_sequence(node, True))
Loader.add_constructor("!reset", lambda loader, node: None)
PLAIN, GPU = (yaml.load(text, Loader)["services"] for text in FILES.values())


def filled(text: str, **variables: str) -> str:
    """Return a value with its variables replaced, as Compose does; unset ones get defaults."""
    return _VARIABLE.sub(lambda m: variables.get(m[1]) or (m[3] if m[2] == "-" else ""), text)


def _prefix(name: str) -> str:
    return name.upper().replace("-", "_")


def settings_of(name: str, monkeypatch: pytest.MonkeyPatch, *stacks: dict[str, Any]) -> Any:
    """Return a service's settings in its container; later stacks override earlier ones."""
    for stack in stacks:
        for variable, value in stack[name]["environment"].items():
            monkeypatch.setenv(variable, filled(value, API_KEYS="a,b", VLLM_API_KEY="c"))
    return parse_settings(SETTINGS[name], [])


@pytest.mark.parametrize("name", SETTINGS)
def test_every_variable_of_a_container_is_a_setting_of_its_service(name):
    setting_names = {f"{_prefix(name)}_{field}".upper() for field in SETTINGS[name].model_fields}
    setting_names |= {f"SCOREKIT_{field}".upper() for field in Secrets.model_fields}
    setting_names |= {"JUDGE_UPSTREAM_API_KEY"} if name == "judge" else set()
    variables = {*PLAIN[name]["environment"], *GPU[name]["environment"]}
    image_variables = {"HF_TOKEN", "HF_HUB_OFFLINE", *DEFAULT_MODELS}
    assert variables - setting_names <= (set() if name == "judge" else image_variables)


@pytest.mark.parametrize("name", SETTINGS)
def test_a_service_starts_without_keys_and_ends_before_it_is_killed(name, monkeypatch):
    settings = settings_of(name, monkeypatch, PLAIN)
    assert load_api_keys(settings, Secrets()) == ()
    assert settings.host == "0.0.0.0" and settings.cache.startswith("redis://cache:6379/")
    assert PLAIN[name]["ports"] == [
        f"127.0.0.1:${{{_prefix(name)}_PORT:-{settings.port}}}:{settings.port}"
    ]
    assert int(PLAIN[name]["stop_grace_period"].removesuffix("s")) > settings.drain_s
    assert f"'127.0.0.1', {settings.port}, " in PLAIN[name]["healthcheck"]["test"][-1]


@pytest.mark.parametrize("name", SETTINGS)
def test_on_gpus_a_service_wants_the_keys_that_compose_demands(name, monkeypatch):
    assert GPU[name]["environment"]["SCOREKIT_API_KEYS"].startswith("${API_KEYS:?")
    settings = settings_of(name, monkeypatch, PLAIN, GPU)
    assert not settings.no_auth
    assert load_api_keys(settings, Secrets()) == (b"a", b"b")
    if name == "retriever":
        assert settings.index == Path("/index/pages")
    elif name == "judge":
        assert settings.backend == "openai" and settings.base_url == "http://vllm:8000/v1"
        assert UpstreamSecrets().key.get_secret_value() == "c"
        assert f"--served-model-name {settings.model} " in filled(GPU["vllm"]["command"])
    else:
        assert (settings.device, settings.dtype) == ("cuda", "bfloat16")


def test_caches_are_apart():
    assert len({PLAIN[name]["environment"][f"{_prefix(name)}_CACHE"] for name in SETTINGS}) == len(
        SETTINGS
    )


@pytest.mark.parametrize("name", [*PLAIN, "vllm", "train-volumes"])
def test_a_container_has_few_rights_a_limit_and_no_door_to_the_outside(name):
    service = PLAIN.get(name) or GPU[name]
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    restarts = {"trainer": "no", "train-volumes": "no"}  # these two end by themselves
    assert service["restart"] == restarts.get(name, "unless-stopped") and service["mem_limit"]
    ports = [*service.get("ports", []), *GPU.get(name, {}).get("ports", [])]
    assert all(port.startswith("127.0.0.1:") for port in ports)
    assert ("ports" in service) == (name not in UNPUBLISHED)
    if "build" in service and name not in restarts:
        assert service["read_only"] and service["init"] and service["healthcheck"]["test"]


def test_with_no_profile_only_the_services_and_their_cache_start():
    assert {n for n, s in PLAIN.items() if "profiles" not in s} == {
        "cache",
        *SETTINGS.keys() - PROFILE_SERVICES,
    }
    assert PLAIN["retriever"]["profiles"] == ["search"]
    assert PLAIN["reward-model"]["profiles"] == ["reward"]
    assert {n for n, s in PLAIN.items() if s.get("profiles") == ["train"]} == {
        "sampler-1",
        "sampler-2",
        "trainer",
    }


def test_the_retriever_reads_its_pages_into_what_it_serves():
    retriever = PLAIN["retriever"]
    mounts = [filled(mount).rpartition(":/") for mount in retriever["volumes"]]
    assert [f"/{inside}" for _, _, inside in mounts] == ["/pages:ro", "/index"]
    command = filled(retriever["entrypoint"][-1])
    index = retriever["environment"]["RETRIEVER_INDEX"]
    assert f"ingest /pages --index {index} " in command
    assert command.endswith("&& exec python -m services.retriever")  # which gets the signals
    assert filled(retriever["entrypoint"][-1], INGEST_FLAGS="--x y").count("--x y") == 1


def test_the_example_names_every_variable_with_what_it_is_when_unset():
    example_values = dict(re.findall(r"^#?([A-Z][A-Z0-9_]+)=(\S*)", EXAMPLE, re.M))
    defaults: dict[str, set[str]] = {}
    for text in FILES.values():
        for variable, kind, default in _VARIABLE.findall(text):
            defaults.setdefault(variable, set()).update({default} if kind == "-" else {""})
    assert set(example_values) == set(defaults)
    for variable, value in example_values.items():
        assert value in defaults[variable], variable


def test_a_copy_of_the_example_changes_nothing():
    """Check that it overrides no default of compose.gpu.yml and has no comment after a value.

    Compose reads a comment after an empty value as the value.
    """
    live = [line for line in EXAMPLE.splitlines() if line and not line.startswith("#")]
    assert live == ["API_KEYS=", "VLLM_API_KEY=", "HF_TOKEN="]
    assert not re.search(r"^#?\w+=[ \t]+#", EXAMPLE, re.M)


def test_folders_that_are_mounted_are_there():
    mounts = [m for s in (*PLAIN.values(), *GPU.values()) for m in s.get("volumes", [])]
    mounts = [filled(mount) for mount in mounts]
    folders = [mount.split(":")[0] for mount in mounts if mount.startswith("./")]
    assert len(folders) == 16
    for folder in folders:
        assert any((ROOT / folder).iterdir()), folder


def test_images_share_the_layers_that_are_not_of_their_role():
    """Check the order: a RUN repeats if an ARG above it changes, and torch is installed once."""
    lines = (ROOT / "deploy/docker/Dockerfile").read_text().splitlines()
    line_numbers = [
        lines.index(line) for line in ('RUN bash install.sh torch "${TORCH}"', "ARG EXTRAS")
    ]
    assert line_numbers == sorted(line_numbers)
    assert lines.index("ARG ROLE") > lines.index("FROM runtime AS service") > line_numbers[1]
