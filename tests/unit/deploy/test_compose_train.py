"""Check the compose profile `train`: two samplers, and a trainer that agrees with them."""

from __future__ import annotations

from typing import Any

import pytest

from scorekit.config import load_config
from tests.unit.deploy.test_compose import GPU, PLAIN, ROOT, filled
from trainer.translation.config import TranslationConfig

SAMPLERS = ("sampler-1", "sampler-2")
URLS = [f"http://{name}:8000" for name in SAMPLERS]
STACKS = {"plain": PLAIN, "gpu": GPU}


def flags(command: list[str]) -> dict[str, list[str]]:
    """Return the values of the options `--name=value` and `--name value` of a command."""
    values: dict[str, list[str]] = {}
    for i, word in enumerate(map(filled, command)):
        if word.startswith("--"):
            name, has_value, value = word.partition("=")
            following = command[i + 1] if i + 1 < len(command) else "--"
            is_pair = not has_value and not following.startswith("--")
            values.setdefault(name, []).append(following if is_pair else value)
    return values


def trainer_config(stack: dict[str, Any]) -> TranslationConfig:
    """Return the config of the trainer's container, as its command reads it."""
    options = flags(stack["trainer"]["command"])
    return load_config(TranslationConfig, ROOT / options["--config"][0], options.get("--set"))


def mounts(service: dict[str, Any]) -> dict[str, str]:
    """Return `source:mode` of a container's mounts by the path inside."""
    parts = [filled(mount).split(":") for mount in service["volumes"]]
    return {path: ":".join([source, *mode]) for source, path, *mode in parts}


@pytest.mark.parametrize("stack", STACKS.values(), ids=STACKS)
def test_the_trainer_samples_from_both_samplers_and_resumes(stack):
    cfg = trainer_config(stack)
    assert cfg.generation.engine == "vllm" and cfg.generation.vllm.url == URLS
    assert cfg.rl.max_staleness == 1
    assert "--resume" in stack["trainer"]["command"]
    assert cfg.misc.run_dir.startswith("/runs/") and mounts(stack["trainer"])["/runs"] == "runs"
    for path in (cfg.data.train, cfg.data.eval):
        assert (ROOT / str(path)).is_file() and mounts(stack["trainer"])["/app/demo/data"]


@pytest.mark.parametrize("stack", STACKS.values(), ids=STACKS)
def test_trainer_and_samplers_have_one_model_key_and_folder_of_weights(stack):
    cfg, trainer = trainer_config(stack), stack["trainer"]
    for name in SAMPLERS:
        options = flags(stack[name]["command"])
        assert options["--model"] == [cfg.policy.path]
        assert 0 < cfg.policy.lora.r <= int(options["--max-lora-rank"][0])
        assert options["--logprobs-mode"] == ["processed_logprobs"] and "--enable-lora" in options
        assert options["--port"] == ["8000"]
        sync_dir = str(cfg.generation.vllm.sync_dir)
        assert (mounts(trainer)[sync_dir], mounts(stack[name])[sync_dir]) == ("sync", "sync:ro")
        key = stack[name]["environment"]["VLLM_API_KEY"]
        assert key == trainer["environment"]["VLLM_API_KEY"] and key.startswith("${VLLM_API_KEY:")
        model_folders = {path for path in mounts(trainer) if path.startswith("/models")}
        assert model_folders <= set(mounts(stack[name]))


def test_only_the_trainer_reaches_the_samplers():
    in_network = {name for name, service in PLAIN.items() if "sampling" in service["networks"]}
    assert in_network == {*SAMPLERS, "trainer"}
    for stack in STACKS.values():
        for name in SAMPLERS:
            assert "ports" not in stack[name]
            assert "VLLM_SERVER_DEV_MODE" not in stack[name]["environment"]
            assert stack[name].get("networks", ["sampling"]) == ["sampling"]
    assert PLAIN["sampler-1"]["environment"]["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] == "True"


def test_the_trainer_starts_when_all_that_it_calls_are_healthy():
    trainer = PLAIN["trainer"]
    services = {"metricx": "METRICX_URL", "xcomet": "XCOMET_URL"}
    assert trainer["depends_on"] == {
        name: {"condition": "service_healthy"} for name in (*services, *SAMPLERS)
    }
    for name, variable in services.items():
        port = PLAIN[name]["environment"][f"{name.upper()}_PORT"]
        assert trainer["environment"][variable] == f"http://{name}:{port}"
        assert set(PLAIN[name]["networks"]) <= set(trainer["networks"])


def test_on_gpus_each_container_has_its_own():
    ids = []
    for name in (*SAMPLERS, "trainer", "metricx", "xcomet", "vllm"):
        (device,) = GPU[name]["deploy"]["resources"]["reservations"]["devices"]
        ids += map(filled, device["device_ids"])
    assert len(set(ids)) == len(ids) == 6


def test_on_gpus_the_samplers_run_vllms_image_as_the_user_that_owns_the_volumes():
    for name in SAMPLERS:
        sampler = GPU[name]
        assert sampler["image"] == GPU["vllm"]["image"]
        assert sampler["build"] is None  # else `up --build` gives vLLM's tag to another image
        assert sampler["user"] == "10001:10001"
        condition = {"condition": "service_completed_successfully"}
        assert sampler["depends_on"] == {"train-volumes": condition}
        assert set(mounts(sampler)) == set(mounts(GPU["train-volumes"]))
    assert GPU["train-volumes"]["image"] == GPU["trainer"]["image"]
