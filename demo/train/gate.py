"""Test whether PPO against the services raises held-out chrF: three seeds, and a control.

    python -m demo.train.gate --out demo/gate.json

Each seed is a run of `python -m trainer train` with the demo's config on `final_test.jsonl`, a set
that nothing was tuned on. The control must not improve: it is the same run behind proxies that give
each score and each list of spans to another sample of its request. So the rewards keep their
distribution and lose their meaning.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
from fastapi import FastAPI, Request
from rich.console import Console
from rich.table import Table

from demo.common import DATA, MODELS
from demo.run import CONFIG
from scorekit.command import run_command
from scorekit.net.http_clients import async_client
from scorekit.paired import mean_interval
from testing.processes import exit_on_sigterm, run_module, running_services, serving
from trainer.runs.run_log import read_jsonl

FIGURES = (
    "chrf",
    "bleu",
    "metricx_score_mean",
    "xcomet_score_mean",
    "spans_mean",
    "completion_length_mean",
)


def shuffling_proxy(url: str, seed: int) -> FastAPI:
    """Return a proxy for the service at `url` that shuffles score and spans between samples."""
    app = FastAPI()
    rng = random.Random(seed)
    client = async_client([url], timeout=600)

    @app.get("/v1/info")
    async def info() -> Any:
        return (await client.get(f"{url}/v1/info")).json()

    @app.post("/v1/score")
    async def score(request: Request) -> Any:
        request_body = await request.json()
        answer = (await client.post(f"{url}/v1/score", json=request_body)).json()
        good = [result for result in answer["results"] if result["ok"]]
        texts = [
            s["mt"]
            for s, r in zip(request_body["samples"], answer["results"], strict=True)
            if r["ok"]
        ]
        scored_spans = [(r["score"], r.get("error_spans")) for r in good]
        rng.shuffle(scored_spans)
        for result, mt, (value, spans) in zip(good, texts, scored_spans, strict=True):
            result["score"] = value
            if spans is not None:
                result["error_spans"] = [
                    {**span, "end": min(span["end"], len(mt))}
                    for span in spans
                    if span["start"] < len(mt)
                ]
        return answer

    return app


def run_trainer(folder: Path, seed: int, urls: tuple[str, str], overrides: list[str]) -> None:
    """Run the trainer, as a user would."""
    command = ["trainer", "train", "--config", str(CONFIG)]
    settings = [
        f"misc.seed={seed}",
        f"misc.run_dir={folder}",
        "misc.overwrite=true",
        f"data.eval={DATA / 'final_test.jsonl'}",
        "reward.batch_size=512",  # one request a batch, so that the control shuffles all of it
        "eval.eval_every_n_updates=0",
        "misc.dump_every_n_updates=0",
        *overrides,
    ]
    for setting in settings:
        command += ["--set", setting]
    if code := run_module(*command, env={"METRICX_URL": urls[0], "XCOMET_URL": urls[1]}):
        raise SystemExit(f"the trainer ended with exit code {code}")


def read_outcome(folder: Path) -> dict[str, Any]:
    """Return the stats before and after, and the paired change of sentence chrF with its
    interval.
    """
    lines = read_jsonl(folder / "eval.jsonl")
    first, last = lines[0], lines[-1]
    before, after = (_chrf(folder / line["completions"]) for line in (first, last))
    differences = [a - b for a, b in zip(after, before, strict=True)]
    low, high = mean_interval(differences)
    return {
        "sources": len(differences),
        "before": {name: first[name] for name in FIGURES},
        "after": {name: last[name] for name in FIGURES},
        "sentence_chrf_change": float(np.mean(differences)),
        "interval_95": [low, high],
    }


def _chrf(path: Path) -> list[float]:
    return [line["chrf"] for line in read_jsonl(path)]


def show(outcomes: dict[str, dict[str, Any]]) -> None:
    """Print one row per run."""
    table = Table("run", "chrF", "BLEU", "MetricX", "xCOMET", "spans", "length", "sentence chrF")
    for name, outcome in outcomes.items():
        cells = [f"{outcome['before'][f]:.2f} → {outcome['after'][f]:.2f}" for f in FIGURES]
        low, high = outcome["interval_95"]
        change = f"{outcome['sentence_chrf_change']:+.2f} [{low:+.2f}, {high:+.2f}]"
        table.add_row(name, *cells, change)
    Console(width=150).print(table)


def main() -> None:
    """Run all arms against one pair of services; write the JSON after each."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--out", type=Path, default=Path("runs/gate/gate.json"))
    parser.add_argument("--set", nargs="*", default=[], help="overrides of the demo's config")
    args = parser.parse_args()
    exit_on_sigterm()
    work = Path("runs/gate")
    work.mkdir(parents=True, exist_ok=True)
    outcomes: dict[str, dict[str, Any]] = {}
    with (
        running_services(
            work, {name: ("--model", str(MODELS / name)) for name in ("metricx", "xcomet")}
        ) as services,
        serving(shuffling_proxy(services["metricx"], 1)) as shuffled_metricx,
        serving(shuffling_proxy(services["xcomet"], 2)) as shuffled_xcomet,
    ):
        rewards = (services["metricx"], services["xcomet"])
        arms = [(f"seed {seed}", seed, rewards) for seed in args.seeds]
        arms.append(("shuffled rewards", args.seeds[0], (shuffled_metricx, shuffled_xcomet)))
        for name, seed, urls in arms:
            folder = work / name.replace(" ", "_")
            run_trainer(folder, seed, urls, args.set)
            outcomes[name] = read_outcome(folder)
            args.out.write_text(json.dumps(outcomes, indent=1) + "\n", encoding="utf-8")
    show(outcomes)


if __name__ == "__main__":
    run_command(main)
