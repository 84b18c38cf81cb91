"""How many planted wrong references does `search verify` find, how many right ones does it drop?

Every third question of the search demo (140), its retriever, its generator and a judge by rules, on
real ports. 15 % of the references are replaced by what one gets who takes another figure of the
page (seeded). The verifier is the demo's stand-in (`demo.search.loop.verifier`), which errs by
itself, in just that way: 0, 10 or 20 % of its answers are wrong, half of these whenever they are
asked for, and of 5 % more it is not sure. Asked 1, 3 and 5 times; its answers have to be all one
(`verify.consensus` 1), or more than half of them (0.51). Each figure is the mean of three seeds, of
plant and verifier both. A row counts as found, or as lost, where it is dropped, whichever its
class. The generator reads the whole pages rightly but for what is too small there.

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
from demo.processes import serving
from demo.search.generator import create_app
from demo.search.loop.verifier import Verifying
from demo.search.loop.wrong_references import plant, read_rows, write_rows
from demo.search.reading import Reader
from demo.search.run import HERE, ingest, open_services
from trainer.search.curation.verification.classes import Compared, TruthClass, class_of

ERRORS, KS, SEEDS = (0.0, 0.1, 0.2), (1, 3, 5), (0, 1, 2)
ALL, MOST = 1.0, 0.51  # consensus
_DROP = ("GT_ERROR", "BOTH_WRONG", "UNCERTAIN")


@dataclass(frozen=True, slots=True)
class Found:
    """Of one command. Shares of 1: of the planted, dropped; of the others, dropped; the same where
    an outvoted verifier makes a row uncertain. classes: of planted and others."""

    found: float
    lost: float
    found_strict: float
    lost_strict: float
    classes: dict[str, dict[str, int]]


def questions(quick: bool) -> Iterator[Measurement]:
    """All figures."""
    seeds, errors = ((0,), (0.1,)) if quick else (SEEDS, ERRORS)
    folder = WORK / "verification"
    folder.mkdir(parents=True, exist_ok=True)
    rows, reader = read_rows()[:: 14 if quick else 3], Reader()
    if not (folder / "index").exists():
        ingest(folder / "index", HERE / "corpus")
    with open_services(folder) as (settings, _):
        of: dict[tuple[float, int, float], list[Found]] = {}
        for seed in seeds:
            made, wrong = plant(rows, reader, seed)
            write_rows(folder / f"questions-{seed}.jsonl", made)
            for error in errors:
                for key, found in _by_k(folder, settings[3::2], error, seed, wrong):
                    of.setdefault((error, *key), []).append(found)
        for (error, k, consensus), each in sorted(of.items()):
            yield from _figures(error, k, consensus, each)


def _by_k(
    folder: Path, settings: Sequence[str], error: float, seed: int, wrong: set[str]
) -> Iterator[tuple[tuple[int, float], Found]]:
    """Each command of one verifier; what an earlier one has asked is asked no more."""
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
                told = [f"{key}={value}" for key, value in values.items()]
                _verify(out, [*settings, *told])
                yield (k, consensus), _found(out, wrong)


def _verify(out: Path, flags: list[str]) -> None:
    """The command, in this process: to begin one takes longer than most of these."""
    from trainer.search.curation.verification.commands import verify

    with contextlib.redirect_stdout(io.StringIO()):
        verify(out, set_=flags, overwrite=True)


def _found(out: Path, wrong: set[str]) -> Found:
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
    return Found(
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


def _figures(
    error: float, k: int, consensus: float, each: Sequence[Found]
) -> Iterator[Measurement]:
    need = "all" if consensus == ALL else "most"
    where = f"error {error:.0%}, k {k}, {need} agree"
    classes = [one.classes for one in each]
    for what, values in (
        ("planted errors found", [one.found for one in each]),
        ("right ones dropped", [one.lost for one in each]),
        ("outvoted is uncertain: planted errors found", [one.found_strict for one in each]),
        ("outvoted is uncertain: right ones dropped", [one.lost_strict for one in each]),
    ):
        shares = [100 * value for value in values]
        details: dict[str, Any] = {"seeds": shares}
        if what == "planted errors found":
            details["classes"] = classes
        yield Measurement(f"{where}: {what}", statistics.mean(shares), "%", details=details)


if __name__ == "__main__":
    run("verification", __doc__, questions)
