"""Check that Prometheus' rules and Grafana's dashboard use metrics that the services export."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import threading
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import promql_parser as promql
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families
from pydantic import SecretStr

from scorekit.server import metrics
from scorekit.server.app import create_app
from scorekit.server.settings import Secrets, ServiceSettings
from services.embedder.settings import EmbedderSettings
from services.judge.settings import JudgeSettings
from services.metricx.settings import MetricXSettings
from services.retriever.settings import RetrieverSettings
from services.reward_model.settings import RewardModelSettings
from services.xcomet.settings import XCometSettings
from testing.servers import FakeBackend, running_app, running_service, wait_ready, wait_until
from tools import dashboard

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "deploy/observability"
SETTINGS = (MetricXSettings, XCometSettings, JudgeSettings, EmbedderSettings)
#: Labels that Prometheus' own configuration adds to every series of a target.
TARGET_LABELS = {"job", "instance", "service"}
RULES = [
    rule
    for group in yaml.safe_load((FOLDER / "alerts.yml").read_text())["groups"]
    for rule in group["rules"]
]
PANELS = [p for p in json.loads(dashboard.FILE.read_text())["panels"] if p["type"] != "row"]
PANEL_EXPRS = [target["expr"] for panel in PANELS for target in panel["targets"]]


class OnADevice(FakeBackend):
    """A fake that reports GPU memory."""

    def memory_bytes(self) -> tuple[int, int, int]:
        """Return 1 of 4 GB in use, at most 2 so far."""
        return 10**9, 2 * 10**9, 4 * 10**9


@pytest.fixture(scope="module")
def exported_series() -> dict[str, dict[str, set[str]]]:
    """Return for each series in a live service's /metrics: label -> its values."""
    key = {"Authorization": "Bearer key"}
    labels_by_series: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    with running_service(OnADevice(), Secrets(api_keys=SecretStr("key"))) as url:
        samples = [{"src": "a house", "mt": mt} for mt in ("ein Haus", "Haus", "nan")]
        for _ in range(2):
            httpx.post(f"{url}/v1/score", json={"samples": samples}, headers=key)
        httpx.post(f"{url}/v1/score", json={"samples": samples})  # 401
        text = httpx.get(f"{url}/metrics", headers=key).text
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = labels_by_series[sample.name]
            for label, value in sample.labels.items():
                labels[label].add(value)
    return labels_by_series


def parsed(expr: str) -> Any:
    """Parse an expression with Grafana's variables filled in."""
    return promql.parse(expr.replace("$__rate_interval", "5m").replace("$service", "metricx"))


def nodes(expr: str) -> list[Any]:
    """Return every node of an expression."""
    visited: list[Any] = []
    promql.walk(parsed(expr), visited.append)
    return visited


def selectors(expr: str) -> Iterator[tuple[str, list[Any]]]:
    """Yield name and matchers of each series that an expression reads."""
    for node in nodes(expr):
        if isinstance(node, promql.VectorSelector):
            yield node.name, node.matchers.matchers


@pytest.mark.parametrize("expr", [rule["expr"] for rule in RULES] + PANEL_EXPRS)
def test_every_series_and_label_is_one_that_a_service_gives(exported_series, expr):
    for name, matchers in selectors(expr):
        if name == "up":  # Prometheus' own
            continue
        assert name in exported_series, f"no service gives {name}"
        for matcher in matchers:
            if matcher.name in TARGET_LABELS:
                continue
            values = exported_series[name][matcher.name]
            exact = matcher.op in (promql.MatchOp.Equal, promql.MatchOp.NotEqual)
            pattern = re.escape(matcher.value) if exact else matcher.value
            assert any(re.fullmatch(pattern, v) for v in values), (
                f"{name}: {matcher.name}, {pattern}"
            )


@pytest.mark.parametrize("expr", [rule["expr"] for rule in RULES] + PANEL_EXPRS)
def test_every_label_that_is_grouped_by_is_there(exported_series, expr):
    label_names = TARGET_LABELS.union(*(exported_series[name] for name, _ in selectors(expr)))
    for node in nodes(expr):
        if isinstance(node, promql.AggregateExpr):
            assert set(node.modifier.labels) <= label_names


def test_what_is_alerted_on_begins_at_zero():
    """Check initial zeros: else the first failure is a first value, which is no increase."""
    with running_service(FakeBackend()) as url:
        text = httpx.get(f"{url}/metrics").text
    for series in (
        'scorekit_samples_total{outcome="model_failure"} 0.0',
        'scorekit_samples_total{outcome="upstream"} 0.0',
        'scorekit_requests_total{route="/v1/score",status="500"} 0.0',
    ):
        assert series in text


class Waits(FakeBackend):
    """A fake that loads when a test releases it."""

    def __init__(self) -> None:
        super().__init__()
        self.may_load = threading.Event()

    def load(self) -> Any:
        """Wait, then load."""
        assert self.may_load.wait(30)
        return super().load()


def gauges(url: str) -> dict[str, float]:
    """Return every series without labels."""
    families = text_string_to_metric_families(httpx.get(f"{url}/metrics").text)
    return {s.name: s.value for family in families for s in family.samples if not s.labels}


def test_loaded_and_ready_say_what_health_says():
    backend = Waits()
    app = create_app(backend, ServiceSettings(cache="memory"))
    with running_app(app, loaded=False) as url:
        wait_until(lambda: httpx.get(f"{url}/health/live").status_code == 200)
        assert (gauges(url)["scorekit_loaded"], gauges(url)["scorekit_ready"]) == (0, 0)
        backend.may_load.set()
        wait_ready(url)
        assert (gauges(url)["scorekit_loaded"], gauges(url)["scorekit_ready"]) == (1, 1)
        app.state.service.draining = True
        assert httpx.get(f"{url}/health/ready").status_code == 503
        assert (gauges(url)["scorekit_loaded"], gauges(url)["scorekit_ready"]) == (1, 0)


def test_limits_and_the_time_of_the_cache_are_told(tmp_path):
    limits = {"max_queue_items": 77, "max_queue_tokens": 7777}
    with running_service(FakeBackend(), cache=f"sqlite:///{tmp_path}/c", **limits) as url:
        httpx.post(f"{url}/v1/score", json={"samples": [{"src": "a", "mt": "b"}]})
        values = gauges(url)
    assert values["scorekit_queue_items_limit"] == 77
    assert values["scorekit_queue_tokens_limit"] == 7777
    assert values["scorekit_cache_seconds_count"] == 1
    machine_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert (
        values["process_resident_memory_bytes"]
        < values["scorekit_host_memory_limit_bytes"]
        <= machine_bytes
    )


def test_the_memory_limit_is_the_least_of_machine_and_container(tmp_path, monkeypatch):
    files = tmp_path / "v2", tmp_path / "v1"
    monkeypatch.setattr(metrics, "_MEMORY_LIMITS", [f"{file}" for file in files])
    machine = metrics.memory_limit_bytes()
    files[0].write_text("max\n")
    assert metrics.memory_limit_bytes() == machine
    files[1].write_text("9223372036854771712\n")  # version 1 without a limit
    assert metrics.memory_limit_bytes() == machine
    files[0].write_text("1048576\n")
    assert metrics.memory_limit_bytes() == 1048576


def test_alerts_have_one_name_each_a_severity_and_a_summary():
    names = [rule["alert"] for rule in RULES]
    assert len(set(names)) == len(names)
    for rule in RULES:
        assert rule["labels"]["severity"] in ("critical", "warning", "info")
        assert rule["annotations"]["summary"]


def test_a_summary_names_only_labels_that_its_alert_has():
    for rule in RULES:
        groups = [node for node in nodes(rule["expr"]) if isinstance(node, promql.AggregateExpr)]
        has = set(groups[0].modifier.labels) if groups else TARGET_LABELS
        named = set(re.findall(r"\$labels\.(\w+)", rule["annotations"]["summary"]))
        assert named <= has, rule["alert"]


def test_every_alert_and_no_other_has_a_section_in_the_runbook():
    text = (ROOT / "docs/how-to/operate.md").read_text(encoding="utf-8")
    assert re.findall(r"^### (Scorekit\w+)$", text, re.M) == [rule["alert"] for rule in RULES]


def test_every_alert_is_made_to_fire_by_the_rules_own_test():
    text = (FOLDER / "alerts_test.yml").read_text()
    assert set(re.findall(r'alertname="(\w+)"', text)) == {rule["alert"] for rule in RULES}


@pytest.mark.parametrize(
    "command",
    [
        "check rules alerts.yml",
        "test rules alerts_test.yml",
        "check config --syntax-only prometheus.yml",
    ],
)
def test_promtool_accepts(command):
    if shutil.which("promtool") is None:
        pytest.skip("no promtool: it is in Debian's package `prometheus`")
    done = subprocess.run(
        ["promtool", *command.split()], cwd=FOLDER, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_promtool_accepts_the_job_for_kubernetes(tmp_path):
    if shutil.which("promtool") is None:
        pytest.skip("no promtool: it is in Debian's package `prometheus`")
    config = yaml.safe_load((ROOT / "deploy/k8s/monitoring/scrape.yaml").read_text())
    for job in config["scrape_configs"]:
        del job["kubernetes_sd_configs"]  # Debian builds its Prometheus without it
    file = tmp_path / "prometheus.yml"
    file.write_text(yaml.safe_dump(config))
    command = ["promtool", "check", "config", "--syntax-only", file]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_prometheus_scrapes_every_service_on_its_port_with_a_key_from_a_file():
    (job,) = yaml.safe_load((FOLDER / "prometheus.yml").read_text())["scrape_configs"]
    assert job["job_name"] == "scorekit"  # the rules name it
    assert job["authorization"]["credentials_file"] == "/run/secrets/scorekit_api_key"
    # Parts of profiles: not reported as down if they are not started.
    assert job["dns_sd_configs"] == [
        {"names": [name], "type": "A", "port": settings.model_fields["port"].default}
        for name, settings in (
            ("retriever", RetrieverSettings),
            ("reward-model", RewardModelSettings),
        )
    ]
    instance = job["relabel_configs"][-1]
    assert instance["replacement"] == "$1:$2"
    assert re.fullmatch(instance["regex"], "retriever;10.0.0.1:8005").groups() == (
        *("retriever", "8005"),
    )
    targets_by_service = {s["labels"]["service"]: s["targets"] for s in job["static_configs"]}
    assert targets_by_service == {
        (name := settings.model_config["env_prefix"].lower().rstrip("_")): [
            f"{name}:{settings.model_fields['port'].default}"
        ]
        for settings in SETTINGS
    }


def test_the_dashboard_is_what_its_tool_writes():
    assert dashboard.FILE.read_text(encoding="utf-8") == dashboard.text(), (
        "run `python -m tools.dashboard`"
    )


def test_panels_have_ids_of_their_own_and_do_not_overlap():
    board = dashboard.build()
    ids = [panel["id"] for panel in board["panels"]]
    assert len(set(ids)) == len(ids)
    used_cells: set[tuple[int, int]] = set()
    for panel in board["panels"]:
        grid_pos = panel["gridPos"]
        cells = {
            (grid_pos["x"] + x, grid_pos["y"] + y)
            for x in range(grid_pos["w"])
            for y in range(grid_pos["h"])
        }
        assert not cells & used_cells, panel["title"]
        assert max(x for x, _ in cells) < 24
        used_cells |= cells


def test_a_panel_asks_the_chosen_source_for_the_chosen_services():
    names = {variable["name"] for variable in dashboard.build()["templating"]["list"]}
    assert names == {"datasource", "service"}
    for panel in PANELS:
        assert panel["targets"]
        for target in panel["targets"]:
            assert target["datasource"]["uid"] == panel["datasource"]["uid"] == "${datasource}"
            for name, _ in selectors(target["expr"]):
                assert f"{name}{{" in target["expr"]
            assert target["expr"].count('service=~"$service"') == len([*selectors(target["expr"])])


def test_a_legend_names_only_labels_of_its_series(exported_series):
    for panel in PANELS:
        for target in panel["targets"]:
            groups = [n for n in nodes(target["expr"]) if isinstance(n, promql.AggregateExpr)]
            has = set(groups[0].modifier.labels) if groups else TARGET_LABELS
            assert set(re.findall(r"{{(\w+)}}", target["legendFormat"])) <= has, panel["title"]


def test_the_dashboard_is_provisioned_from_where_it_lies():
    provisioning = FOLDER / "grafana/provisioning"
    (source,) = yaml.safe_load((provisioning / "datasources/prometheus.yml").read_text())[
        "datasources"
    ]
    assert (source["type"], source["url"]) == ("prometheus", "http://prometheus:9090")
    (provider,) = yaml.safe_load((provisioning / "dashboards/scorekit.yml").read_text())[
        "providers"
    ]
    assert provider["options"]["path"] == "/var/lib/grafana/dashboards"
    assert dashboard.FILE.parent == FOLDER / "grafana/dashboards"
