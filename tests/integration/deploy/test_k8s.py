"""Check that the manifests are valid and agree with the services and each other."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

import scorekit
from scorekit.server.metrics import Metrics
from scorekit.server.settings import ServiceSettings, parse_settings
from services.embedder.settings import EmbedderSettings
from services.judge.settings import JudgeSettings
from services.metricx.settings import MetricXSettings
from services.retriever.settings import RetrieverSettings
from services.reward_model.settings import RewardModelSettings
from services.xcomet.settings import XCometSettings

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "deploy/k8s"
SETTINGS = {
    "metricx": MetricXSettings,
    "xcomet": XCometSettings,
    "judge": JudgeSettings,
    "embedder": EmbedderSettings,
    "retriever": RetrieverSettings,
    "reward-model": RewardModelSettings,
}
#: The first one's claim, cache, keys and rules are used by the others, each applied by choice.
FOLDERS = (FOLDER, FOLDER / "search", FOLDER / "reward")
KUSTOMIZATIONS = [yaml.safe_load((folder / "kustomization.yaml").read_text()) for folder in FOLDERS]
KUSTOMIZATION = KUSTOMIZATIONS[0]
OBJECTS = [
    (path.name, manifest)
    for folder in FOLDERS
    for path in sorted(folder.glob("*.yaml"))
    if path.name != "kustomization.yaml"
    for manifest in yaml.safe_load_all(path.read_text())
]
RAY = next(manifest for _, manifest in OBJECTS if manifest["kind"] == "RayService")["spec"]
PLAIN = [manifest for _, manifest in OBJECTS if manifest["kind"] != "RayService"]


def objects(kind: str) -> dict[str, Any]:
    """Return the specs of a kind by name."""
    return {t["metadata"]["name"]: t["spec"] for t in PLAIN if t["kind"] == kind}


def ray_pods() -> list[dict[str, Any]]:
    """Return the pod templates of the Ray cluster."""
    cluster = RAY["rayClusterConfig"]
    groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    return [group["template"] for group in groups]


def pods() -> list[dict[str, Any]]:
    """Return every pod's spec."""
    specs = [*objects("Deployment").values(), *objects("Job").values()]
    templates = [spec["template"] for spec in specs] + ray_pods()
    return [template["spec"] for template in templates]


def container(name: str) -> dict[str, Any]:
    """Return the container of a Deployment."""
    (only,) = objects("Deployment")[name]["template"]["spec"]["containers"]
    return only


def environment(name: str) -> dict[str, str]:
    """Return a container's variables; secrets are returned as references."""
    return {entry["name"]: entry.get("value", "secret") for entry in container(name)["env"]}


@pytest.fixture(params=SETTINGS)
def service(request, monkeypatch, tmp_path) -> tuple[str, ServiceSettings]:
    """Return a service's name and its settings as its container would read them."""
    for key, value in environment(request.param).items():
        monkeypatch.setenv(key, value)
    return request.param, parse_settings(SETTINGS[request.param], [])


@pytest.mark.parametrize("version", ["1.30", kubernetes_validate.latest_version()])
def test_every_manifest_is_valid(version):
    bare = {"apiVersion": "v1", "kind": "Pod", "metadata": {}}
    for manifest in PLAIN + [bare | template for template in ray_pods()]:
        kubernetes_validate.validate(manifest, version, strict=True)


def test_the_ray_applications_are_valid():
    schema = pytest.importorskip("ray.serve.schema")
    config = schema.ServeDeploySchema.model_validate(yaml.safe_load(RAY["serveConfigV2"]))
    names = [name.replace("-", "_") for name in SETTINGS if name != "retriever"]
    assert {app.name: app.import_path for app in config.applications} == {
        name: f"deploy.ray.apps:{name}" for name in names
    }
    pins = (ROOT / "constraints.txt").read_text().splitlines()
    assert f"ray=={RAY['rayClusterConfig']['rayVersion']}" in pins


def test_every_variable_is_a_setting(service):
    name, _ = service
    prefix = f"{name.upper().replace('-', '_')}_"
    secrets = {"JUDGE_UPSTREAM_API_KEY"}
    for key in environment(name):
        if key.startswith(prefix) and key not in secrets:
            assert key.removeprefix(prefix).lower() in SETTINGS[name].model_fields, key


def test_the_first_replicas_of_the_ray_applications_fit_the_cluster():
    """Check that KubeRay, which waits for every application, does not wait forever."""
    (group,) = RAY["rayClusterConfig"]["workerGroupSpecs"]
    (pod_container,) = group["template"]["spec"]["containers"]
    resources = pod_container["resources"]
    free: list[float] = [int(resources["limits"]["nvidia.com/gpu"])] * group["minReplicas"]
    num_cpus = int(resources["requests"]["cpu"]) * group["minReplicas"]
    needs: list[dict[str, float]] = []
    for application in yaml.safe_load(RAY["serveConfigV2"])["applications"]:
        for deployment in application["deployments"]:
            scaling = deployment.get("autoscaling_config", {})
            num_replicas = deployment.get("num_replicas", scaling.get("min_replicas", 1))
            needs += [deployment["ray_actor_options"]] * num_replicas
    for num_gpus in sorted((need.get("num_gpus", 0) for need in needs), reverse=True):
        free[free.index(max(free))] -= num_gpus
    assert min(free) >= 0
    assert sum(need["num_cpus"] for need in needs) <= num_cpus


@pytest.mark.parametrize("name", [name for name in SETTINGS if name != "retriever"])
def test_ray_pods_have_the_settings_of_each_service(name):
    prefix = f"{name.upper().replace('-', '_')}_"
    for template in ray_pods():
        variables = {
            entry["name"].removeprefix(prefix).lower(): entry.get("value", "")
            for entry in template["spec"]["containers"][0]["env"]
            if entry["name"].startswith(prefix)
        }
        assert variables.keys() <= SETTINGS[name].model_fields.keys()
        assert variables["api_keys_file"] == environment(name)[f"{prefix}API_KEYS_FILE"]
        assert variables["cache"] == environment(name)[f"{prefix}CACHE"]


def test_ports_agree(service):
    name, settings = service
    (port,) = container(name)["ports"]
    assert settings.host == "0.0.0.0"
    assert port == {"name": "http", "containerPort": settings.port}
    (exposed,) = objects("Service")[name]["ports"]
    assert exposed == {"name": "http", "port": settings.port, "targetPort": "http"}


def test_the_grace_period_is_longer_than_pre_stop_and_draining(service):
    name, settings = service
    command = container(name)["lifecycle"]["preStop"]["exec"]["command"]
    assert command[0] == "sleep"
    grace = objects("Deployment")[name]["template"]["spec"]["terminationGracePeriodSeconds"]
    assert grace >= int(command[1]) + settings.drain_s + 10


def test_probes_ask_routes_that_there_are(service):
    name, _ = service
    routes = json.loads((ROOT / f"services/{name.replace('-', '_')}/openapi.json").read_text())[
        "paths"
    ]
    paths = {
        probe: container(name)[f"{probe}Probe"]["httpGet"]["path"]
        for probe in ("startup", "readiness", "liveness")
    }
    assert set(paths.values()) <= set(routes)
    assert paths["startup"] == paths["readiness"] == "/health/ready"
    assert paths["liveness"] == "/health/live"  # a service that loads or drains is not killed


def test_the_retriever_serves_what_the_job_makes():
    (ingest,) = objects("Job")["retriever-ingest"]["template"]["spec"]["containers"]
    assert ingest["image"] == container("retriever")["image"]
    index = ingest["command"][ingest["command"].index("--index") + 1]
    assert environment("retriever")["RETRIEVER_INDEX"] == index
    assert ingest["command"][:4] == ["python", "-m", "services.retriever", "ingest"]


def test_the_image_is_the_services_own_of_this_version():
    tags = {image["name"]: image["newTag"] for k in KUSTOMIZATIONS for image in k["images"]}
    for name in SETTINGS:
        assert container(name)["image"] == f"scorekit-{name}:{scorekit.__version__}"
        assert tags[f"scorekit-{name}"] == scorekit.__version__


def test_no_container_may_more_than_it_needs():
    for spec in pods():
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        for pod_container in spec["containers"]:
            assert pod_container["securityContext"]["allowPrivilegeEscalation"] is False
            assert pod_container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
            assert (
                pod_container["resources"]["limits"]["memory"]
                == pod_container["resources"]["requests"]["memory"]
            )
    for name in objects("Deployment"):
        assert container(name)["securityContext"]["readOnlyRootFilesystem"] is True


def test_kubernetes_sets_no_variable_that_is_a_setting():
    """Check service links: for a Service `metricx` Kubernetes would set METRICX_PORT=tcp://..."""
    for spec in pods():
        if any("valkey" not in pod_container["image"] for pod_container in spec["containers"]):
            assert spec["enableServiceLinks"] is False


def test_what_is_mounted_is_there():
    claims = set(objects("PersistentVolumeClaim"))
    for spec in pods():
        volumes = {volume["name"]: volume for volume in spec.get("volumes", [])}
        for pod_container in spec["containers"]:
            assert {mount["name"] for mount in pod_container.get("volumeMounts", [])} == set(
                volumes
            )
        for volume in volumes.values():
            if "persistentVolumeClaim" in volume:
                assert volume["persistentVolumeClaim"]["claimName"] in claims


def test_secrets_come_from_files_and_every_one_that_is_read_is_made():
    assert not [manifest for manifest in PLAIN if manifest["kind"] == "Secret"]
    keys_by_secret = {
        generator["name"]: {file.partition("=")[0] for file in generator["files"]}
        for generator in KUSTOMIZATION["secretGenerator"]
    }
    for spec in pods():
        for entry in [
            entry for generator in spec["containers"] for entry in generator.get("env", [])
        ]:
            if "valueFrom" in entry:
                secret_ref = entry["valueFrom"]["secretKeyRef"]
                assert secret_ref["key"] in keys_by_secret[secret_ref["name"]]
        for volume in spec.get("volumes", []):
            if "secret" in volume:
                assert "api-keys" in keys_by_secret[volume["secret"]["secretName"]]
    ignored = (ROOT / ".gitignore").read_text().splitlines()
    assert "deploy/k8s/secrets/" in ignored


@pytest.mark.parametrize("name", [*SETTINGS, "cache"])
def test_selectors_find_their_pods(name):
    deployment = objects("Deployment")[name]
    labels = deployment["template"]["metadata"]["labels"].items()
    selectors = [deployment["selector"]["matchLabels"], objects("Service")[name]["selector"]]
    if name in SETTINGS:
        selectors.append(objects("PodDisruptionBudget")[name]["selector"]["matchLabels"])
    for selector in selectors:
        assert selector.items() <= labels


def test_replicas_follow_a_figure_that_services_give_and_the_adapter_hands_on():
    (rule,) = yaml.safe_load((FOLDER / "monitoring/adapter.yaml").read_text())["rules"]
    series = rule["seriesQuery"].partition("{")[0]
    assert series in {family.name for family in Metrics().registry.collect()}
    (job,) = yaml.safe_load((FOLDER / "monitoring/scrape.yaml").read_text())["scrape_configs"]
    labels = {rule.get("target_label") for rule in job["relabel_configs"]}
    assert set(rule["resources"]["overrides"]) | {"service"} <= labels
    for name in SETTINGS:
        scaler = objects("HorizontalPodAutoscaler")[name]
        assert scaler["scaleTargetRef"]["name"] == name
        assert "replicas" not in objects("Deployment")[name]
        (metric,) = scaler["metrics"]
        assert metric["pods"]["metric"]["name"] == rule["name"]["as"] == series
        # One replica may always be unavailable, for an update or while a node is drained.
        assert scaler["minReplicas"] > objects("PodDisruptionBudget")[name]["maxUnavailable"]


def test_only_callers_reach_the_services_and_only_services_the_cache():
    policies = objects("NetworkPolicy")
    assert policies["nobody"] == {"podSelector": {}, "policyTypes": ["Ingress"]}
    (rule,) = policies["scorers"]["ingress"]
    (caller,) = rule["from"]
    (expression,) = caller["namespaceSelector"]["matchExpressions"]
    assert expression["values"] == ["trainer", "synth", "monitoring"]
    assert {p["port"] for p in rule["ports"]} == {
        settings.model_fields["port"].default for settings in SETTINGS.values()
    }
    (rule,) = policies["cache"]["ingress"]
    (caller,) = rule["from"]
    assert caller == {"podSelector": policies["scorers"]["podSelector"]}
    assert (
        policies["cache"]["podSelector"]["matchLabels"] == objects("Service")["cache"]["selector"]
    )
    scorer = policies["scorers"]["podSelector"]["matchLabels"].items()
    for name, deployment in objects("Deployment").items():
        is_scorer = scorer <= deployment["template"]["metadata"]["labels"].items()
        assert is_scorer == (name in SETTINGS)


def test_the_cache_that_services_name_is_there(service):
    _, settings = service
    (port,) = objects("Service")["cache"]["ports"]
    assert settings.cache.startswith(f"redis://cache:{port['port']}/")
    assert "allkeys-lru" in container("cache")["args"][0]


def test_kustomize_builds_all_of_it(tmp_path):
    left_out = {"kustomization.yaml", "rayservice.yaml"}
    for folder, kustomization in zip(FOLDERS, KUSTOMIZATIONS, strict=True):
        file_names = {path.name for path in folder.glob("*.yaml")}
        assert {*kustomization["resources"]} == file_names - left_out
    if shutil.which("kubectl") is None:
        pytest.skip("no kubectl")
    copy = shutil.copytree(FOLDER, tmp_path / "k8s")
    (copy / "secrets").mkdir(exist_ok=True)
    for generator in KUSTOMIZATION["secretGenerator"]:
        for file in generator["files"]:
            (copy / file.partition("=")[2]).write_text("value")
    built = []
    for folder in FOLDERS:
        done = subprocess.run(
            ["kubectl", "kustomize", copy / folder.relative_to(FOLDER)],
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        built += yaml.safe_load_all(done.stdout)
    for manifest in built:
        kubernetes_validate.validate(manifest, "1.30", strict=True)
        assert manifest["metadata"].get("namespace", "scorekit") == "scorekit"
    assert sum(manifest["kind"] == "Secret" for manifest in built) == 4
