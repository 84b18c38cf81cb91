"""`python -m demo.synth`: the synthesis pipeline on small real models, from documents to Parquet.

A teacher (the demo's policy behind OpenAI's chat form), MetricX and the judge's rules run as
processes; the corpus is the Python documentation in MADLAD-400's shape.
"""

from __future__ import annotations

from scorekit.interrupts import end_at_once

if __name__ == "__main__":
    end_at_once()  # at Ctrl-C during the imports below

import contextlib
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import httpx
import typer
from rich.table import Table
from rich.text import Text

from demo.common import ROOT, STOPPED, console, print_step
from demo.madlad_shard import documents, write_shard
from scorekit.command import clean_exit, run_app
from scorekit.errors import UserError
from scorekit.net.http_clients import sync_client
from scorekit.report.render import visible
from synth.report.page import write_report
from testing.processes import (
    READY_S,
    exit_on_sigterm,
    free_port,
    run_module,
    running,
    running_services,
)

CONFIG = ROOT / "configs/synth/demo.yaml"
METRICX = ROOT / "demo/models/metricx"
#: Pairs shown.
BEST = 10


def run_demo(run_dir: Path, more: list[str]) -> None:
    """Run the demo. Raise UserError if a part of it cannot run."""
    started = time.monotonic()
    exit_on_sigterm()
    run_dir.mkdir(parents=True, exist_ok=True)
    for cache_file in run_dir.glob("answers.sqlite*"):  # a demo shows all of the work
        cache_file.unlink()
    logs = run_dir.with_name(run_dir.name + "-services")
    logs.mkdir(exist_ok=True)
    print_step("1", "Starting teacher, MetricX and judge (small models, no GPU, no hub)")
    with (
        running_teacher(logs) as teacher,
        running_services(logs, {"metricx": ("--model", str(METRICX)), "judge": ()}) as urls,
    ):
        metricx, judge = urls["metricx"], urls["judge"]
        console.print(f"   {teacher}   {metricx}   {judge}   (logs in {logs}/)")
        shard = write_shard(run_dir / "madlad", documents("en"), lang="en")
        print_step("2", f"All seven stages on {shard}")
        settings = {
            "run.out_dir": str(run_dir),
            "data.files": json.dumps([str(shard)]),
            "teacher.base_url": teacher,
            "metricx.url": metricx,
            "filters.llm_judge.url": judge,
        }
        run_pipeline([f"{key}={value}" for key, value in settings.items()] + more)
    print_step("3", "The pairs that MetricX likes best")
    report = write_report(run_dir, "Demo: English to Korean by a small teacher")
    show(run_dir)
    console.print(f"[bold]report[/]  {report}", soft_wrap=True)
    console.print(f"[bold]time[/]    {time.monotonic() - started:.0f} s")


@contextlib.contextmanager
def running_teacher(folder: Path) -> Iterator[str]:
    """Serve the demo's policy as an OpenAI-compatible server; yield its URL with /v1."""
    port = free_port()
    log = folder / "teacher.log"
    with running("demo.llm_server", "--port", str(port), log=log) as process:
        url = f"http://127.0.0.1:{port}/v1"
        deadline = time.monotonic() + READY_S
        while True:
            with contextlib.suppress(httpx.HTTPError):
                with sync_client(url, timeout_s=5.0) as client:
                    if client.get("/models").status_code == 200:
                        break
            if process.poll() is not None or time.monotonic() > deadline:
                tail = log.read_text(encoding="utf-8", errors="replace")[-2000:]
                raise UserError(f"the teacher does not get ready; the end of {log}:\n{tail}")
            time.sleep(0.1)
        yield url


def run_pipeline(overrides: list[str]) -> None:
    """Run `python -m synth run --stage all` from the beginning."""
    flags = [part for override in overrides for part in ("--set", override)]
    command = ("synth", "run", "--config", str(CONFIG), "--stage", "all", "--overwrite", "--yes")
    if run_module(*command, *flags) != 0:
        raise UserError("the pipeline failed; what it said stands above")


def show(run_dir: Path) -> None:
    """Print the best pairs, why the others were rejected, and where the files are."""
    lines = (run_dir / "export/train.jsonl").read_text(encoding="utf-8").splitlines()
    pairs = sorted(map(json.loads, lines), key=lambda pair: pair["metricx_qe_score_best"])
    table = Table("MetricX", "source", "translation", title_justify="left")
    for pair in pairs[:BEST]:
        texts = (Text(visible(pair[key])) for key in ("source_text", "target_text"))
        table.add_row(f"{pair['metricx_qe_score_best']:.2f}", *texts)
    console.print(table)
    console.print(
        "   The teacher has 4 million parameters and the scorer no more: this shows the way of the "
        "data, not good translations."
    )
    summary = f"\n[bold]pairs[/]   {len(pairs)} in {run_dir / 'export/train.parquet'}"
    console.print(summary, soft_wrap=True)


def main(
    run_dir: Annotated[Path, typer.Option(help="Folder of the run.")] = Path("runs/demo-synth"),
    set_: Annotated[
        list[str] | None, typer.Option("--set", help="Override a key: section.key=value.")
    ] = None,
) -> None:
    """Make synthetic Korean translations of the Python documentation, filter and export them."""
    with clean_exit(stopped=STOPPED, stdout="log"):
        run_demo(run_dir, set_ or [])


if __name__ == "__main__":
    run_app(lambda: typer.run(main))
