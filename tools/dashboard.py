"""Write the Grafana dashboard: python -m tools.dashboard. `DASHBOARD` below is what to edit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from scorekit.command import run_command

FILE = Path(__file__).parents[1] / "deploy/observability/grafana/dashboards/scorekit.json"

_SCORE = 'service=~"$service",route=~"/v1/(score|embeddings|search).*"'
_OURS = 'service=~"$service"'
_DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
_COLUMNS = 24  # of Grafana's grid
_HEIGHT = 8


def _quantiles(metric: str, labels: str = _OURS) -> list[tuple[str, str]]:
    """Return legends and expressions of the median and the 99th percentile of a histogram."""
    buckets = f"sum by (service, le) (rate({metric}_bucket{{{labels}}}[$__rate_interval]))"
    return [
        (f"{{{{service}}}} {name}", f"histogram_quantile({quantile}, {buckets})")
        for name, quantile in (("p50", 0.5), ("p99", 0.99))
    ]


def _rate(metric: str, *by: str, labels: str = _OURS) -> str:
    """Return the rate per second, summed over the replicas of a service."""
    names = ", ".join(("service", *by))
    return f"sum by ({names}) (rate({metric}{{{labels}}}[$__rate_interval]))"


_PAD, _REAL = _rate("scorekit_padding_tokens_total"), _rate("scorekit_tokens_total")
_BATCHES, _BATCHED = _rate("scorekit_batch_samples_count"), _rate("scorekit_batch_samples_sum")
_HITS = _rate("scorekit_cache_hits_total")
_BAD = 'service=~"$service",outcome!~"ok|cached"'
_REFUSED = 'service=~"$service",status=~"4..|5..",route!~"/health.*"'

#: Rows of panels: (title, unit, [(legend, expression), ...]).
DASHBOARD: dict[str, list[tuple[str, str, list[tuple[str, str]]]]] = {
    "State": [
        (
            "Takes work",
            "short",
            [
                ("{{service}} {{instance}}", f"scorekit_ready{{{_OURS}}}"),
            ],
        ),
        (
            "Up for",
            "s",
            [
                (
                    "{{service}} {{instance}}",
                    f'time() - process_start_time_seconds{{job="scorekit",{_OURS}}}',
                ),
            ],
        ),
    ],
    "Rate": [
        (
            "Requests a second, by status",
            "reqps",
            [
                (
                    "{{service}} {{status}}",
                    _rate("scorekit_requests_total", "status", labels=_SCORE),
                ),
            ],
        ),
        (
            "Samples a second, by outcome",
            "short",
            [
                ("{{service}} {{outcome}}", _rate("scorekit_samples_total", "outcome")),
            ],
        ),
        (
            "Tokens a second that the model reads, padding left out",
            "short",
            [
                ("{{service}}", _REAL),
            ],
        ),
    ],
    "Latency, by part": [
        ("Request, whole", "s", _quantiles("scorekit_request_seconds", _SCORE)),
        ("Queue", "s", _quantiles("scorekit_queue_seconds")),
        ("Tokeniser, a piece of up to 256 samples", "s", _quantiles("scorekit_tokenise_seconds")),
        ("Model, a batch", "s", _quantiles("scorekit_model_seconds")),
        ("Cache, second tier", "s", _quantiles("scorekit_cache_seconds")),
    ],
    "Queue": [
        (
            "Samples",
            "short",
            [
                ("{{service}} {{instance}}", f"scorekit_queue_items{{{_OURS}}}"),
                ("{{service}} {{instance}} limit", f"scorekit_queue_items_limit{{{_OURS}}}"),
            ],
        ),
        (
            "Tokens, about",
            "short",
            [
                ("{{service}} {{instance}}", f"scorekit_queue_tokens{{{_OURS}}}"),
                ("{{service}} {{instance}} limit", f"scorekit_queue_tokens_limit{{{_OURS}}}"),
            ],
        ),
        (
            "Longest wait of a sample that the model has not begun with",
            "s",
            [
                (
                    "{{service}} {{instance}} {{line}}",
                    f"max by (service, instance, line) (scorekit_longest_wait_seconds{{{_OURS}}})",
                ),
            ],
        ),
        (
            "Samples a second that joined an equal one in flight",
            "short",
            [
                ("{{service}}", _rate("scorekit_joined_total")),
            ],
        ),
    ],
    "Waste": [
        (
            "Padding, share of what the model reads",
            "percentunit",
            [
                ("{{service}}", f"{_PAD} / ({_PAD} + {_REAL})"),
            ],
        ),
        ("Samples a batch, mean", "short", [("{{service}}", f"{_BATCHED} / {_BATCHES}")]),
    ],
    "Cache": [
        (
            "Hits a second, by tier",
            "short",
            [
                ("{{service}} {{tier}}", _rate("scorekit_cache_hits_total", "tier")),
            ],
        ),
        (
            "Hits, share of the samples",
            "percentunit",
            [
                ("{{service}}", f"{_HITS} / {_rate('scorekit_samples_total')}"),
            ],
        ),
        (
            "Failed calls and damaged values a second; 1: left alone",
            "short",
            [
                ("{{service}} failed", _rate("scorekit_cache_errors_total")),
                ("{{service}} damaged", _rate("scorekit_cache_damaged_total")),
                ("{{service}} {{instance}} left alone", f"scorekit_cache_breaker_open{{{_OURS}}}"),
            ],
        ),
    ],
    "Errors": [
        (
            "Failed samples a second, by type",
            "short",
            [
                (
                    "{{service}} {{outcome}}",
                    _rate("scorekit_samples_total", "outcome", labels=_BAD),
                ),
            ],
        ),
        (
            "Refused requests a second, by status",
            "reqps",
            [
                (
                    "{{service}} {{status}}",
                    _rate("scorekit_requests_total", "status", labels=_REFUSED),
                ),
            ],
        ),
    ],
    "Memory of the process": [
        (
            "Resident",
            "bytes",
            [
                (
                    "{{service}} {{instance}}",
                    f'process_resident_memory_bytes{{job="scorekit",{_OURS}}}',
                ),
                ("{{service}} {{instance}} peak", f"scorekit_host_memory_peak_bytes{{{_OURS}}}"),
                ("{{service}} {{instance}} limit", f"scorekit_host_memory_limit_bytes{{{_OURS}}}"),
            ],
        ),
        (
            "CPUs in use",
            "short",
            [
                (
                    "{{service}} {{instance}}",
                    f'rate(process_cpu_seconds_total{{job="scorekit",{_OURS}}}[$__rate_interval])',
                ),
            ],
        ),
    ],
    "GPU": [
        (
            "Memory of tensors",
            "bytes",
            [
                ("{{service}} {{instance}}", f"scorekit_device_memory_bytes{{{_OURS}}}"),
                ("{{service}} {{instance}} peak", f"scorekit_device_memory_peak_bytes{{{_OURS}}}"),
                (
                    "{{service}} {{instance}} total",
                    f"scorekit_device_memory_total_bytes{{{_OURS}}}",
                ),
            ],
        ),
        (
            "Share of the time in which the model has a batch",
            "percentunit",
            [
                (
                    "{{service}} {{instance}}",
                    f"rate(scorekit_model_seconds_sum{{{_OURS}}}[$__rate_interval])",
                ),
            ],
        ),
    ],
}


def build() -> dict[str, Any]:
    """Return the dashboard as Grafana imports it."""
    panels: list[dict[str, Any]] = []
    y = 0
    for row, contents in DASHBOARD.items():
        panels.append(
            {
                "type": "row",
                "title": row,
                "collapsed": False,
                "panels": [],
                "gridPos": {"x": 0, "y": y, "w": _COLUMNS, "h": 1},
            }
        )
        y += 1
        width = _COLUMNS // min(3, len(contents))
        for index, (title, unit, targets) in enumerate(contents):
            line, column = divmod(index, 3)
            position = {"x": column * width, "y": y + line * _HEIGHT, "w": width, "h": _HEIGHT}
            panels.append(_panel(title, unit, targets, position))
        y += _HEIGHT * ((len(contents) + 2) // 3)
    for number, panel in enumerate(panels, start=1):
        panel["id"] = number
    return {
        "uid": "scorekit",
        "title": "scorekit",
        "tags": ["scorekit"],
        "schemaVersion": 39,
        "editable": True,
        "graphTooltip": 1,  # one cross hair for all panels
        "refresh": "30s",
        "time": {"from": "now-3h", "to": "now"},
        "timepicker": {},
        "timezone": "browser",
        "annotations": {"list": []},
        "templating": {"list": _variables()},
        "panels": panels,
    }


def _panel(
    title: str, unit: str, targets: list[tuple[str, str]], position: dict[str, int]
) -> dict[str, Any]:
    return {
        "type": "timeseries",
        "title": title,
        "gridPos": position,
        "datasource": _DATASOURCE,
        "fieldConfig": {
            "defaults": {"unit": unit, "min": 0, "custom": {"lineWidth": 1, "fillOpacity": 5}},
            "overrides": [],
        },
        "options": {
            "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True},
            "tooltip": {"mode": "multi", "sort": "desc"},
        },
        "targets": [
            {
                "refId": chr(ord("A") + n),
                "datasource": _DATASOURCE,
                "expr": expr,
                "legendFormat": legend,
            }
            for n, (legend, expr) in enumerate(targets)
        ],
    }


def _variables() -> list[dict[str, Any]]:
    everything = {"selected": True, "text": ["All"], "value": ["$__all"]}
    query = "label_values(scorekit_ready, service)"
    return [
        {"name": "datasource", "label": "Source", "type": "datasource", "query": "prometheus"},
        {
            "name": "service",
            "label": "Service",
            "type": "query",
            "datasource": _DATASOURCE,
            "query": {"query": query, "refId": "service"},
            "refresh": 2,
            "sort": 1,
            "multi": True,
            "includeAll": True,
            "current": everything,
        },
    ]


def text() -> str:
    """Return the file's content."""
    return json.dumps(build(), indent=1, ensure_ascii=False) + "\n"


def main() -> None:
    """Write the file."""
    FILE.write_text(text(), encoding="utf-8")


if __name__ == "__main__":
    run_command(main)
