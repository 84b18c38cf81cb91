"""Does `meta-eval` tell a metric that knows nothing here? About three minutes.

    python -m bench.meta_eval [--quick]

The demo's MetricX and xCOMET learned from English and Korean user-interface strings. They are asked
about English to German and Chinese to English TED talks, beside twins of them with random matrices
and a random CometKiwi. Writes bench/results/meta_eval.json and the tables of
docs/how-to/meta-eval.md;
the reports stand in runs/bench/meta_eval.
"""

from __future__ import annotations

import json
import logging
import shutil
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from bench.common import (
    RESULTS,
    ROOT,
    WORK,
    machine,
    markdown_table,
    parse_quick,
    service,
    write_between,
    write_json,
)
from bench.meta_eval.checkpoints import metricx_twin, random_kiwi, xcomet_twin
from scorekit.command import run_command
from scorekit.errors import UserError
from scorekit.processes import end_with_parent

HERE = Path(__file__).parent
DOCUMENT = ROOT / "docs/how-to/meta-eval.md"
BEGIN = "<!-- written by `python -m bench.meta_eval` -->"
END = "<!-- end of it -->"
#: File -> its languages, and the human translations among its systems.
SETS = {
    "ende": ("English to German", ("ref",)),
    "zhen": ("Chinese to English", ("ref", "refB")),
}
#: The set that the page shows; the results file has all.
SHOWN = "ende"
#: Figures in the page -> their titles; the results file has all.
AGREEMENT = {
    "kendall": "tau-b, all",
    "kendall_item": "tau-b by segment",
    "acc_eq": "acc_eq",
    "system_accuracy": "systems: accuracy",
}
SPANS = {
    "chars_recall": "chars R",
    "chars_f1": "chars F1",
    "mpp_f1": "MPP F1",
}


def models(folder: Path) -> dict[str, tuple[str, Path]]:
    """Return name -> (service, checkpoint); random ones are made in `folder`."""
    demo = ROOT / "demo/models"
    return {
        "metricx": ("services.metricx", demo / "metricx"),
        "xcomet": ("services.xcomet", demo / "xcomet"),
        "random-metricx": ("services.metricx", metricx_twin(folder / "random-metricx")),
        "random-xcomet": ("services.xcomet", xcomet_twin(folder / "random-xcomet")),
        "random-kiwi": ("services.xcomet", random_kiwi(folder / "random-kiwi")),
    }


def evaluated(name: str, urls: dict[str, str], folder: Path, quick: bool) -> dict[str, Any]:
    """Return the stats of a set by the command that users have."""
    metrics = [part for metric, url in urls.items() for part in ("--metric", f"{metric}={url}")]
    left_out = [part for system in SETS[name][1] for part in ("--exclude", system)]
    size = ["--segments", "8" if quick else "120", "--draws", "20" if quick else "500"]
    judged = str(HERE / f"mqm_ted_{name}.jsonl.gz")
    command = [sys.executable, "-m", "scorekit", "meta-eval", judged, str(folder)]
    done = subprocess.run(
        [*command, *metrics, *left_out, *size],
        stdout=subprocess.DEVNULL,
        preexec_fn=end_with_parent(),
    )
    if done.returncode:
        raise UserError(f"meta-eval of {name} ended with {done.returncode}")
    stats = json.loads((folder / "figures.json").read_text(encoding="utf-8"))
    keys = ("name", "scored", "failed", "values", "intervals", "beyond")
    stats["metrics"] = [
        {key: metric_stats[key] for key in keys} for metric_stats in stats["metrics"]
    ]
    return {key: stats[key] for key in ("rows", "segments", "systems", "draws", "metrics")}


def report(stats_by_name: dict[str, dict[str, Any]]) -> str:
    """Return sets as tables."""
    parts = []
    for name, result in stats_by_name.items():
        parts.append(
            f"{SETS[name][0]}: {result['rows']:,} translations, {result['segments']} segments, "
            f"{result['systems']} systems, scored by all"
        )
        parts += [_table(result["metrics"], AGREEMENT), _table(result["metrics"], SPANS)]
    return "\n\n".join(parts)


def _table(metrics: list[dict[str, Any]], titles: dict[str, str]) -> str:
    rows = [
        [metric["name"], *(_cell(metric, key) for key in titles)]
        for metric in metrics
        if any(key in metric["values"] for key in titles)
    ]
    return markdown_table(["", *titles.values()], rows)


def _cell(metric: dict[str, Any], name: str) -> str:
    """Return a number with its star, and its 95 % interval over segments."""
    value = metric["values"].get(name)
    if value is None:
        return "–"
    interval = metric["intervals"][name]["segments"]
    between = f" ({interval[0]:.2f} to {interval[1]:.2f})" if interval else ""
    return f"{value:.3f}{'*' if name in metric['beyond'] else ''}{between}"


def main() -> None:
    """Make, serve, ask, write."""
    quick = parse_quick(__doc__)
    logging.getLogger("httpx").setLevel(logging.WARNING)  # comet lets it speak
    before = machine()
    folder = WORK / "meta_eval"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    with ExitStack() as stack:
        urls = {
            name: stack.enter_context(service(module, "--model", str(path), "--threads", "1"))[1]
            for name, (module, path) in models(folder).items()
        }
        sets = {name: evaluated(name, urls, folder / name, quick) for name in SETS}
    path = (WORK if quick else RESULTS) / "meta_eval.json"
    write_json(path, {"machine": before, "quick": quick, "sets": sets})
    if not quick:
        write_between(BEGIN, END, report({SHOWN: sets[SHOWN]}), DOCUMENT)
    print(f"{report(sets)}\n\n{path.relative_to(ROOT)}")


if __name__ == "__main__":
    run_command(main, stdout="log")
