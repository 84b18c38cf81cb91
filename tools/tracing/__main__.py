"""Count the files and lines that a reader must open to follow one piece of work.

    python -m tools.tracing                   # all, on the demo's small models (3 minutes)
    python -m tools.tracing sample curation   # some of them
    python -m tools.tracing --files prompt    # the files, too, with their functions
    python -m tools.tracing --write           # updates the table in code-map.md

Each piece of work is done for real by the commands that users start. `tools.tracing.record` says
what counts.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import tempfile
from collections.abc import Callable, Mapping
from functools import partial
from http.client import HTTPConnection
from pathlib import Path

from demo.common import MODELS, ROOT, run_checked, set_flags
from demo.madlad_shard import documents, write_shard
from demo.search import run as search
from demo.synth import CONFIG as SYNTH
from demo.synth import running_teacher
from scorekit.command import run_command
from scorekit.errors import UserError
from scorekit.files import write_atomic
from testing.processes import exit_on_sigterm, free_port, running, running_services
from testing.servers import wait_ready, wait_until
from tools.tracing.record import FileTrace

DOCUMENT = ROOT / "docs/reference/code-map.md"
BEGIN = "<!-- traced work: python -m tools.tracing --write -->\n"
END = "<!-- end of traced work -->\n"
#: Two sides of the demo's real data; the first one only warms the service up.
SAMPLES = (
    {"src": "The house is red.", "mt": "집은 빨간색이다."},
    {"src": "The location of the event.", "mt": "일정의 location"},
)
Trace = dict[str, FileTrace]


def trace_sample(folder: Path) -> Trace:
    """Trace one sample through xCOMET's service, from the bytes of its request to its answer."""
    out, port = folder / "trace.json", free_port()
    flags = ("--port", str(port), "--model", str(MODELS / "xcomet"), "--cache", "memory")
    command = ("tools.tracing.record", "--out", str(out), "--by-signal", "services.xcomet", *flags)
    with running(*command, log=folder / "xcomet.log") as process:
        wait_ready(f"http://127.0.0.1:{port}")
        connection = HTTPConnection("127.0.0.1", port)
        for sample in SAMPLES:
            if sample is SAMPLES[-1]:
                os.kill(process.pid, signal.SIGUSR1)
                wait_until(out.with_suffix(".open").exists)
            body = json.dumps({"samples": [sample]})
            connection.request("POST", "/v1/score", body, {"Content-Type": "application/json"})
            answer = json.loads(connection.getresponse().read())
            if not answer["results"][0]["ok"]:
                raise UserError(f"xcomet: gave no score: {answer['results'][0]}")
        os.kill(process.pid, signal.SIGUSR1)
        wait_until(out.exists)
    return _read(out)


def trace_prompt(folder: Path) -> Trace:
    """Trace the second update of the translation demo, with one prompt."""
    values: dict[str, object] = {
        "misc.run_dir": folder / "run",
        "rl.num_updates": 2,
        "rl.batch_size": 1,
        "rl.warmup_updates": 1,
        "eval.eval_limit": 8,
    }
    flags = ("--config", str(ROOT / "configs/translation/demo.yaml"), *set_flags(values))
    models = {name: ("--model", str(MODELS / name)) for name in ("metricx", "xcomet")}
    with running_services(folder, models) as services:
        urls = {"METRICX_URL": services["metricx"], "XCOMET_URL": services["xcomet"]}
        return _record(folder, "trainer", "train", *flags, within=UPDATE, call=2, env=urls)


def trace_question(folder: Path) -> Trace:
    """Trace the second update of the search demo's phase 2, with one question."""
    search.ingest(folder / "index", search.HERE / "corpus")
    values: dict[str, object] = {
        "misc.run_dir": folder / "run",
        "rl.num_updates": 2,
        "rl.batch_size": 1,
        "data.eval": "null",
    }
    with search.open_services(folder) as (settings, _):
        flags = ("--config", str(search.PHASE2), *settings[2:], *set_flags(values))
        return _record(folder, "trainer", "train", *flags, within=UPDATE, call=2)


def trace_sentence(folder: Path) -> Trace:
    """Trace the whole synthesis of some sentences, from the command to the exported pairs."""
    with (
        running_teacher(folder) as teacher,
        running_services(
            folder, {"metricx": ("--model", str(MODELS / "metricx")), "judge": ()}
        ) as urls,
    ):
        values: dict[str, object] = {
            "run.out_dir": folder / "run",
            "data.files": json.dumps([str(write_shard(folder, documents("en"), lang="en"))]),
            "data.sample_pool_size": 40,
            "data.target_examples_total": 6,
            "final_generation.num_candidates": 8,
            "teacher.base_url": teacher,
            "metricx.url": urls["metricx"],
            "filters.llm_judge.url": urls["judge"],
        }
        flags = ("--config", str(SYNTH), "--stage", "all", "--yes", *set_flags(values))
        trace = _record(folder, "synth", "run", *flags)
    if not (folder / "run/export/train.jsonl").read_text(encoding="utf-8"):
        raise UserError("synth: exported no pair, so its way was not traced to the end")
    return trace


def trace_step(folder: Path, step: str) -> Trace:
    """Trace a curation step on the episodes of four questions, which a policy has just played."""
    search.ingest(folder / "index", search.HERE / "corpus")
    with search.open_services(folder) as (settings, policy):
        values = set_flags({"misc.run_dir": folder / "run"})
        search.trainer("collect", *settings, *policy, *values, "--limit", "4")
        files = ("--run", str(folder / "run"), "--out", str(folder / "out"))
        return _record(folder, "trainer", "search", step, *files)


UPDATE = "TrainingLoop.step"
TRACES: dict[str, tuple[str, Callable[[Path], Trace]]] = {
    "sample": ("one sample through xCOMET's service", trace_sample),
    "prompt": ("one prompt to its gradient (translation)", trace_prompt),
    "question": ("one question to its gradient (search)", trace_question),
    "sentence": ("a sentence to its exported pair (synthesis)", trace_sentence),
    "curation": ("a curation step (`buckets`)", partial(trace_step, step="buckets")),
    "paid-curation": (
        "a curation step with paid calls (`alternatives`)",
        partial(trace_step, step="alternatives"),
    ),
}


def _record(
    folder: Path,
    *command: str,
    within: str | None = None,
    call: int = 1,
    env: Mapping[str, str] | None = None,
) -> Trace:
    """Run `python -m COMMAND` under the recorder, and return what ran."""
    out = folder / "trace.json"
    part = ("--within", within, "--call", str(call)) if within else ()
    run_checked("tools.tracing.record", "--out", str(out), *part, *command, env=env)
    return _read(out)


def _read(path: Path) -> Trace:
    trace: Trace = json.loads(path.read_text(encoding="utf-8"))
    if not trace:
        raise UserError(f"{path}: no function of ours ran in the traced part")
    return trace


def count(trace: Trace) -> tuple[int, int, int]:
    """Return files, their lines, and the lines of their functions that ran."""
    files = trace.values()
    return (
        len(trace),
        sum(file["lines"] for file in files),
        sum(file["lines_of_functions"] for file in files),
    )


def table_of(traces: Mapping[str, Trace]) -> str:
    """Return the table in Markdown."""
    rows = [
        f"| {TRACES[name][0]} | " + " | ".join(f"{number:,}" for number in count(trace)) + " |"
        for name, trace in traces.items()
    ]
    header = "| traced | files | their lines | lines of functions that ran |\n|---|---|---|---|\n"
    return header + "\n".join(rows) + "\n"


def main() -> None:
    """Trace what is named, and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(TRACES)}")
    parser.add_argument("--files", action="store_true", help="print files and functions, too")
    parser.add_argument("--write", action="store_true", help=f"update {DOCUMENT.name}")
    options = parser.parse_args()
    names = options.names or list(TRACES)
    if unknown := [name for name in names if name not in TRACES]:
        raise UserError(f"{unknown[0]}: is no traced work. Name one of {', '.join(TRACES)}.")
    if options.write and len(names) < len(TRACES):
        raise UserError("--write: the table has all rows. Name no work.")
    exit_on_sigterm()
    traces = {}
    for name in names:
        with tempfile.TemporaryDirectory(prefix="tracing-") as folder:
            traces[name] = TRACES[name][1](Path(folder))
    if options.files:
        for name, trace in traces.items():
            print(f"\n{TRACES[name][0]}")
            for path, file in trace.items():
                print(f"  {path} ({file['lines']}): {', '.join(file['functions'])}")
    print("\n" + table_of(traces))
    if options.write:
        text = DOCUMENT.read_text(encoding="utf-8")
        text_before, text_after = text.split(BEGIN)[0], text.split(END)[1]
        write_atomic(DOCUMENT, f"{text_before}{BEGIN}\n{table_of(traces)}\n{END}{text_after}")


if __name__ == "__main__":
    run_command(main)
