"""Check the manifests of a trainer with several samplers: each is valid, and they agree."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

import scorekit
from scorekit.config import load_config
from trainer.translation.config import TranslationConfig

FOLDER = Path(__file__).parents[3] / "deploy/k8s/train"
KUSTOMIZATION = yaml.safe_load((FOLDER / "kustomization.yaml").read_text())
OBJECTS = [
    manifest
    for path in KUSTOMIZATION["resources"]
    for manifest in yaml.safe_load_all((FOLDER / path).read_text())
]


def objects(kind: str, manifests: list[dict[str, Any]] = OBJECTS) -> dict[str, Any]:
    """Return the specs of a kind by name."""
    return {t["metadata"]["name"]: t["spec"] for t in manifests if t["kind"] == kind}


def pod(kind: str, name: str, manifests: list[dict[str, Any]] = OBJECTS) -> dict[str, Any]:
    """Return the pod template of a StatefulSet or a Job."""
    template: dict[str, Any] = objects(kind, manifests)[name]["template"]
    return template


def container(template: dict[str, Any]) -> dict[str, Any]:
    """Return the only container of a pod template."""
    (only,) = template["spec"]["containers"]
    return only


PODS = [pod("StatefulSet", "sampler"), pod("Job", "trainer")]
VLLM, TRAINER = map(container, PODS)


def run_shell(pod_container: dict[str, Any], tmp_path: Path, **programs: str) -> list[str]:
    """Run the shell of a container with these programs, each a script; return its lines."""
    for name, script in programs.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / name).chmod(0o755)
    variables = {entry["name"]: entry.get("value", "the-policy") for entry in pod_container["env"]}
    done = subprocess.run(
        [*pod_container["command"], *pod_container["args"]],
        env=variables | {"PATH": f"{tmp_path}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.splitlines()


def trainer_command(template: dict[str, Any], tmp_path: Path) -> list[str]:
    """Return the command that a trainer's container runs in the end, as its shell makes it."""
    return run_shell(container(template), tmp_path, python="printf '%s\\n' \"$@\"")


def trainer_config(template: dict[str, Any], tmp_path: Path) -> TranslationConfig:
    """Return the config as the trainer's container reads it."""
    words = trainer_command(template, tmp_path)
    overrides = [words[i + 1] for i, word in enumerate(words) if word == "--set"]
    assert words[words.index("--config") + 1] == "/config/config.yaml"
    return load_config(TranslationConfig, FOLDER / "config.yaml", overrides)


def sampler_urls(manifests: list[dict[str, Any]]) -> list[str]:
    """Return the URL of each pod of the StatefulSet, as its headless Service names it."""
    samplers = objects("StatefulSet", manifests)["sampler"]
    service = objects("Service", manifests)[samplers["serviceName"]]
    assert service["clusterIP"] == "None"
    (port,) = service["ports"]
    return [
        f"http://sampler-{i}.{samplers['serviceName']}:{port['port']}"
        for i in range(samplers["replicas"])
    ]


def built(tmp_path: Path, num_samplers: int) -> list[dict[str, Any]]:
    """Return what kustomize builds after a user has written another number of samplers."""
    if shutil.which("kubectl") is None:
        pytest.skip("no kubectl")
    copy = shutil.copytree(FOLDER, tmp_path / "train")
    kustomization = yaml.safe_load((copy / "kustomization.yaml").read_text())
    kustomization["replicas"][0]["count"] = num_samplers
    (copy / "kustomization.yaml").write_text(yaml.safe_dump(kustomization))
    (copy / "secrets").mkdir(exist_ok=True)
    for generator in kustomization["secretGenerator"]:
        for file in generator["files"]:
            (copy / file.partition("=")[2]).write_text("value")
    done = subprocess.run(["kubectl", "kustomize", copy], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return list(yaml.safe_load_all(done.stdout))


@pytest.mark.parametrize("version", ["1.30", kubernetes_validate.latest_version()])
def test_every_manifest_is_valid(version):
    for manifest in OBJECTS:
        kubernetes_validate.validate(manifest, version, strict=True)
    assert {*KUSTOMIZATION["resources"], "kustomization.yaml", "config.yaml"} == {
        path.name for path in FOLDER.glob("*.yaml")
    }


@pytest.mark.parametrize("num_samplers", [1, 2, 5])
def test_the_trainer_has_the_url_of_every_sampler(num_samplers, tmp_path):
    manifests = built(tmp_path, num_samplers)
    urls = sampler_urls(manifests)
    assert len(urls) == num_samplers
    cfg = trainer_config(pod("Job", "trainer", manifests), tmp_path)
    assert cfg.generation.vllm.url == urls
    for manifest in manifests:
        kubernetes_validate.validate(manifest, "1.30", strict=True)
        if manifest["kind"] != "Namespace":
            assert manifest["metadata"]["namespace"] == "trainer"


def test_the_trainer_waits_for_every_sampler(tmp_path):
    (waiting,) = pod("Job", "trainer", built(tmp_path, 3))["spec"]["initContainers"]
    # Every second request has an answer; nothing else sleeps here.
    script = f'echo "$3" >>{tmp_path}/requests; test $(grep -c "$3" {tmp_path}/requests) = 2'
    lines = run_shell(waiting, tmp_path, python=script, sleep="true")
    hosts = [url.removeprefix("http://").removesuffix(":8000") for url in sampler_urls(OBJECTS)]
    requests = (tmp_path / "requests").read_text().splitlines()
    assert requests[:4] == [host for host in hosts for _ in range(2)]
    assert requests[4:] == ["sampler-2.samplers"] * 2 and len(lines) == 3


def test_the_wait_ends_with_a_healthy_answer_only(tmp_path):
    (waiting,) = PODS[1]["spec"]["initContainers"]
    code = waiting["args"][0].partition('python -c "')[2].partition('"')[0]
    statuses = {"/health": 503}

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(statuses.get(self.path, 404))
            self.end_headers()

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        code = code.replace("8000", str(server.server_port))
        for status, is_away in ((503, 1), (200, 0)):
            statuses["/health"] = status
            done = subprocess.run([sys.executable, "-c", code, "127.0.0.1"], check=False)
            assert done.returncode == is_away
        server.shutdown()


def test_the_files_have_the_number_of_samplers_that_kustomize_writes(tmp_path):
    (replicas,) = KUSTOMIZATION["replicas"]
    assert replicas == {"name": "sampler", "count": len(sampler_urls(OBJECTS))}
    assert trainer_config(PODS[1], tmp_path).generation.vllm.url == sampler_urls(OBJECTS)


def test_trainer_and_samplers_have_one_model_key_and_folder_of_weights(tmp_path):
    cfg = trainer_config(PODS[1], tmp_path)
    options = dict(arg.partition("=")[::2] for arg in VLLM["args"])
    environments = [{entry["name"]: entry for entry in c["env"]} for c in (VLLM, TRAINER)]
    for variable in ("POLICY", "VLLM_API_KEY"):
        assert environments[0][variable] == environments[1][variable]
    assert options["--model"] == "$(POLICY)" and cfg.policy.path == "the-policy"
    assert 0 < cfg.policy.lora.r <= int(options["--max-lora-rank"])
    assert cfg.generation.engine == "vllm" and cfg.rl.max_staleness == 1
    assert "--resume" in trainer_command(PODS[1], tmp_path)
    mounts = [{m["mountPath"]: m for m in c["volumeMounts"]} for c in (VLLM, TRAINER)]
    sync_dir = str(cfg.generation.vllm.sync_dir)
    assert mounts[0][sync_dir] == {"name": "sync", "mountPath": sync_dir, "readOnly": True}
    assert mounts[1][sync_dir] == {"name": "sync", "mountPath": sync_dir}
    assert objects("PersistentVolumeClaim")["sync"]["accessModes"] == ["ReadWriteMany"]
    for path in (cfg.misc.run_dir, str(cfg.data.train), str(cfg.data.eval)):
        assert path.startswith("/runs/") and "/runs" in mounts[1]


def test_the_image_and_the_services_are_those_of_this_version():
    (image,) = KUSTOMIZATION["images"]
    assert (image["name"], image["newTag"]) == ("scorekit-trainer", scorekit.__version__)
    assert TRAINER["image"] == f"scorekit-trainer:{scorekit.__version__}"
    image, _, tag = VLLM["image"].partition(":")
    assert f'"{image}:${{VLLM_TAG:-{tag}}}"' in (FOLDER.parents[2] / "compose.gpu.yml").read_text()


def test_no_container_may_more_than_it_needs():
    for template in PODS:
        spec = template["spec"]
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert spec["automountServiceAccountToken"] is spec["enableServiceLinks"] is False
        for pod_container in [*spec["containers"], *spec.get("initContainers", [])]:
            security = pod_container["securityContext"]
            assert security["allowPrivilegeEscalation"] is False
            assert security["readOnlyRootFilesystem"] is True
            assert security["capabilities"] == {"drop": ["ALL"]}
            resources = pod_container["resources"]
            assert resources["limits"]["memory"] == resources["requests"]["memory"]
    # One user on both sides of the folder of weights.
    assert len({template["spec"]["securityContext"]["runAsUser"] for template in PODS}) == 1


def test_only_the_trainer_reaches_the_samplers():
    policies = objects("NetworkPolicy")
    assert policies["nobody"] == {"podSelector": {}, "policyTypes": ["Ingress"]}
    assert set(policies) == {"nobody", "samplers"}
    (rule,) = policies["samplers"]["ingress"]
    (caller,) = rule["from"]
    assert set(caller) == {"podSelector"}  # pods of this namespace alone
    sampler_labels, trainer_labels = (t["metadata"]["labels"].items() for t in PODS)
    assert policies["samplers"]["podSelector"]["matchLabels"].items() <= sampler_labels
    assert caller["podSelector"]["matchLabels"].items() <= trainer_labels
    assert not caller["podSelector"]["matchLabels"].items() <= sampler_labels
    (port,) = VLLM["ports"]
    assert rule["ports"] == [{"protocol": "TCP", "port": port["containerPort"]}]
    assert "VLLM_SERVER_DEV_MODE" not in {entry["name"] for entry in VLLM["env"]}


def test_the_namespace_is_one_that_the_services_let_in():
    policies = [*yaml.safe_load_all((FOLDER.parent / "network.yaml").read_text())]
    (scorers,) = [p["spec"] for p in policies if p["metadata"]["name"] == "scorers"]
    (rule,) = scorers["ingress"]
    (expression,) = rule["from"][0]["namespaceSelector"]["matchExpressions"]
    assert KUSTOMIZATION["namespace"] in expression["values"]
    environment = {entry["name"]: entry.get("value", "") for entry in TRAINER["env"]}
    for name in ("metricx", "xcomet"):
        url = environment[f"{name.upper()}_URL"]
        port = int(url.rpartition(":")[2])
        assert url == f"http://{name}.scorekit:{port}"
        assert {"protocol": "TCP", "port": port} in rule["ports"]


def test_selectors_find_the_samplers():
    labels = PODS[0]["metadata"]["labels"].items()
    assert objects("StatefulSet")["sampler"]["selector"]["matchLabels"].items() <= labels
    assert objects("Service")["samplers"]["selector"].items() <= labels
    budget = objects("PodDisruptionBudget")["sampler"]
    assert budget["selector"]["matchLabels"].items() <= labels


def test_what_is_mounted_or_read_is_there():
    secrets = {
        generator["name"]: {file.partition("=")[0] for file in generator["files"]}
        for generator in KUSTOMIZATION["secretGenerator"]
    }
    (run,) = KUSTOMIZATION["configMapGenerator"]
    configs = {"run": {*run["files"], *(text.partition("=")[0] for text in run["literals"])}}
    claims = set(objects("PersistentVolumeClaim"))
    for template in PODS:
        volumes = {volume["name"]: volume for volume in template["spec"]["volumes"]}
        assert {mount["name"] for mount in container(template)["volumeMounts"]} == set(volumes)
        for volume in volumes.values():
            if "persistentVolumeClaim" in volume:
                assert volume["persistentVolumeClaim"]["claimName"] in claims
            if "configMap" in volume:
                assert "config.yaml" in configs[volume["configMap"]["name"]]
        for entry in container(template)["env"]:
            source = entry.get("valueFrom", {})
            for key, keys_by_name in (("secretKeyRef", secrets), ("configMapKeyRef", configs)):
                if key in source:
                    assert source[key]["key"] in keys_by_name[source[key]["name"]]
    ignored = (FOLDER.parents[2] / ".gitignore").read_text().splitlines()
    assert "deploy/k8s/train/secrets/" in ignored
    for generator in KUSTOMIZATION["secretGenerator"]:
        assert all("=secrets/" in file for file in generator["files"])
