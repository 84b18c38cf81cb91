"""Measure how many planted wrong references `search verify` finds, and how many others it drops.

It runs on every third question of the search demo (140), with the demo's retriever and generator
and a judge by rules, on real ports. 15 % of the references are replaced by the answer that results
from another figure of the page (seeded). The verifier is the demo's stand-in
(`demo.search.loop.verifier`), which makes errors of just that kind: 0, 10 or 20 % of its answers
are wrong, half of these in every request, and for 5 % more it is not sure. It is asked 1, 3 and 5
times. All of its answers must agree (`verify.consensus` 1), or more than half of them (0.51). Each
number is the mean of three seeds, each for the planted errors and for the verifier. A row counts as
found, or as lost, if it is dropped, whichever class it has. The generator reads full pages
correctly, except for text that is too small on them.

    python -m bench.verification [--quick]
"""

from __future__ import annotations

import contextlib
import io
import json
import statistics
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from bench.common import WORK, Measurement, run
from demo.search.generator import create_app
from demo.search.loop.verifier import Verifying
from demo.search.loop.wrong_references import plant, read_rows, write_rows
from demo.search.reading import Reader
from demo.search.run import HERE, ingest, open_services
from testing.processes import serving
from trainer.search.steps.agreement import Compared, TruthClass, class_of

ERRORS, KS, SEEDS = (0.0, 0.1, 0.2), (1, 3, 5), (0, 1, 2)
ALL, MOST = 1.0, 0.51  # consensus
_DROP = ("GT_ERROR", "BOTH_WRONG", "UNCERTAIN")


@dataclass(frozen=True, slots=True)
class VerifyResult:
    """Holds the result of one command as shares of 1.

    found_share: dropped rows of the planted ones.
    dropped_share: dropped rows of the others. The strict shares hold if a verifier without a
    majority makes a row uncertain.
    classes: of planted and others.
    """

    found_share: float
    dropped_share: float
    found_share_strict: float
    dropped_share_strict: float
    classes: dict[str, dict[str, int]]


def questions(quick: bool) -> Iterator[Measurement]:
    """Yield all measurements."""
    seeds, errors = ((0,), (0.1,)) if quick else (SEEDS, ERRORS)
    folder = WORK / "verification"
    folder.mkdir(parents=True, exist_ok=True)
    rows, reader = read_rows()[:: 14 if quick else 3], Reader()
    if not (folder / "index").exists():
        ingest(folder / "index", HERE / "corpus")
    with open_services(folder) as (settings, _):
        runs_by_setting: dict[tuple[float, int, float], list[VerifyResult]] = {}
        for seed in seeds:
            planted_rows, wrong = plant(rows, reader, seed)
            write_rows(folder / f"questions-{seed}.jsonl", planted_rows)
            for error in errors:
                for key, found_share in _by_k(folder, settings[3::2], error, seed, wrong):
                    runs_by_setting.setdefault((error, *key), []).append(found_share)
        for (error, k, consensus), runs in sorted(runs_by_setting.items()):
            yield from _measurements(error, k, consensus, runs)


def _by_k(
    folder: Path, settings: Sequence[str], error: float, seed: int, wrong: set[str]
) -> Iterator[tuple[tuple[int, float], VerifyResult]]:
    """Run each command of one verifier, and yield its result.

    Answers are cached: a question that an earlier command asked is not asked again.
    """
    name = f"verifier-{error:g}-{seed}"
    app = create_app(name=name, answerer=Verifying(error=error, seed=seed))
    with serving(app) as url:
        for k in KS:
            for consensus in (ALL, MOST) if k > 1 else (ALL,):
                values = {
                    "data.train": folder / f"questions-{seed}.jsonl",
                    "answers": folder / "answers.sqlite",
                    "answering.generator.temperature": 0,  # it says the same each time
                    "verify.prompts": "all",
                    "verify.k": k,
                    "verify.consensus": consensus,
                    "verify.worksheet_rows": 0,
                    "verify.verifier.base_url": f"{url}/v1",
                    "verify.verifier.model": name,
                }
                out = folder / f"{name}-{k}-{consensus:g}"
                settings_of_run = [f"{key}={value}" for key, value in values.items()]
                _verify(out, [*settings, *settings_of_run])
                yield (k, consensus), _read_result(out, wrong)


def _verify(out: Path, flags: list[str]) -> None:
    """Run the command in this process, because starting one takes longer than most of these."""
    from trainer.search.steps.engine import run_step
    from trainer.search.steps.options import CurationOptions

    with contextlib.redirect_stdout(io.StringIO()):
        run_step("verify", CurationOptions(out=out, set_=flags, overwrite=True))


def _read_result(out: Path, wrong: set[str]) -> VerifyResult:
    rows = [json.loads(line) for line in (out / "decisions.jsonl").open(encoding="utf-8")]
    classes: dict[str, Counter[str]] = {"planted": Counter(), "right": Counter()}
    dropped: Counter[tuple[bool, str]] = Counter()
    for row in rows:
        is_wrong = row["id"] in wrong
        classes["planted" if is_wrong else "right"][row["reason"]] += 1
        dropped[is_wrong, "OK"] += not row["kept"]
        dropped[is_wrong, "UNCERTAIN"] += _class(row, "UNCERTAIN") in _DROP
    counts = {True: len(wrong), False: len(rows) - len(wrong)}
    shares = {key: count / counts[key[0]] for key, count in dropped.items()}
    return VerifyResult(
        shares[True, "OK"],
        shares[False, "OK"],
        shares[True, "UNCERTAIN"],
        shares[False, "UNCERTAIN"],
        {name: dict(sorted(count.items())) for name, count in classes.items()},
    )


def _class(row: dict[str, Any], outvoted: Literal["OK", "UNCERTAIN"]) -> TruthClass | None:
    names = ("stance", "generator_reference", "verifier_reference", "generator_verifier")
    if row["stance"] is None:
        return None
    return class_of(Compared(*(row[name] for name in names)), outvoted)


def _measurements(
    error: float, k: int, consensus: float, runs: Sequence[VerifyResult]
) -> Iterator[Measurement]:
    need = "all" if consensus == ALL else "most"
    setting = f"error {error:.0%}, k {k}, {need} agree"
    classes = [result.classes for result in runs]
    for title, values in (
        ("planted errors found", [result.found_share for result in runs]),
        ("right ones dropped", [result.dropped_share for result in runs]),
        (
            "outvoted is uncertain: planted errors found",
            [result.found_share_strict for result in runs],
        ),
        (
            "outvoted is uncertain: right ones dropped",
            [result.dropped_share_strict for result in runs],
        ),
    ):
        shares = [100 * value for value in values]
        details: dict[str, Any] = {"seeds": shares}
        if title == "planted errors found":
            details["classes"] = classes
        yield Measurement(f"{setting}: {title}", statistics.mean(shares), "%", details=details)


if __name__ == "__main__":
    run("verification", __doc__, questions)
