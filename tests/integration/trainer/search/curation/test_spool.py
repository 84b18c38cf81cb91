"""Check that curation commands store records on disk and not in memory."""

from __future__ import annotations

import sqlite3
import tracemalloc
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tests.kits.trainer.searching.curated import make_question, searched, write_run
from trainer.search.cli import app
from trainer.search.curation.buckets import make_buckets
from trainer.search.curation.config import CurationConfig
from trainer.search.curation.dataset import CurationResult
from trainer.search.curation.disk_spool import DiskSpool
from trainer.search.curation.focus import make_focus
from trainer.search.curation.prior_decisions import PriorDecisions
from trainer.search.curation.samples import read_prompts


@dataclass(frozen=True, slots=True)
class NumberedRecord:
    name: str
    stat: float | None
    more: dict[str, Any]


RECORDS = [
    NumberedRecord("가", 0.1 + 0.2, {"pages": ["a_1"], "of": {"x": 1}}),
    NumberedRecord("'; DROP TABLE things --", None, {}),
    NumberedRecord("\n\u2028\ud800", -1e-300, {"no": None, "yes": True}),
]


def small_disk(monkeypatch: pytest.MonkeyPatch, pages: int) -> None:
    """Limit temporary files to this number of 4 kB pages."""
    connect = sqlite3.connect

    def connected(*args: Any, **more: Any) -> sqlite3.Connection:
        connection = connect(*args, **more)
        connection.execute(f"PRAGMA max_page_count = {pages}")
        return connection

    monkeypatch.setattr(sqlite3, "connect", connected)


@pytest.mark.parametrize("compressed", [False, True])
def test_things_come_back_as_they_were_in_their_order(compressed: bool) -> None:
    spool = DiskSpool(NumberedRecord, compressed=compressed)
    for record in RECORDS:
        spool.append(record)
    assert list(spool) == RECORDS and list(spool) == RECORDS
    assert len(spool) == 3 and bool(spool) and not DiskSpool(NumberedRecord)


def test_things_are_found_by_their_key() -> None:
    spool: DiskSpool[dict[str, int]] = DiskSpool(dict)
    for number, key in enumerate(["a", "b", None, "a"]):
        spool.append({"number": number}, key)
    assert spool.get_all("a") == [{"number": 0}, {"number": 3}]
    assert spool["a"] == spool.get("a") == {"number": 3}
    assert spool.get_all("c") == [] and spool.get("c") is None
    with pytest.raises(KeyError, match="c"):
        spool["c"]
    assert len(spool) == len(list(spool)) == 4


def test_memory_does_not_grow_with_things_and_no_name_leads_to_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SQLITE_TMPDIR", str(tmp_path))
    spool = DiskSpool(str)
    tracemalloc.start()
    for number in range(20_000):
        spool.append(f"{number:500}", f"{number}")
    assert sum(len(text) for text in spool) == 20_000 * 500
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 200_000
    assert list(tmp_path.iterdir()) == []


#: Of a small run and a large one, whose questions are the same.
QUESTIONS, FEW, MANY = 40, 1, 40


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """Return samples for each question -> the folder of a run with them."""
    folder = tmp_path_factory.mktemp("runs")
    questions = [make_question(f"q{number}") for number in range(QUESTIONS)]
    return {
        samples: write_run(
            folder / f"{samples}",
            [searched(q, n, ndcg=0.5, judge=1.0) for q in questions for n in range(samples)],
            questions,
        )
        for samples in (FEW, MANY)
    }


@pytest.mark.parametrize("make", [make_buckets, partial(make_focus, decided=PriorDecisions())])
def test_what_a_command_holds_does_not_grow_with_the_episodes(
    make: Callable[..., CurationResult], runs: dict[int, Path]
) -> None:
    """Check 1,560 more episodes, which would need 400 kB at one line each."""
    few_bytes, many_bytes = (used_bytes(runs[samples], samples, make) for samples in (FEW, MANY))
    assert many_bytes - few_bytes < 120_000


def used_bytes(folder: Path, samples: int, make: Callable[..., CurationResult]) -> int:
    """Return the bytes in use after a command with `samples` episodes for each question."""
    cfg, sizes = CurationConfig(), []
    for _ in range(2):  # the first fills caches
        tracemalloc.start()
        prompts, read = read_prompts([folder], cfg)
        result = make(prompts, read, cfg)
        sizes.append(tracemalloc.get_traced_memory()[0])
        tracemalloc.stop()
        assert sum(len(decision.episodes) for decision in result.decisions) == samples * QUESTIONS
    return min(sizes)


def test_a_full_disk_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = write_run(
        tmp_path / "run", [searched(make_question("q"), n, ndcg=0.5) for n in range(120)]
    )
    small_disk(monkeypatch, 4)
    done = CliRunner().invoke(app, ["buckets", "--run", str(run), "--out", str(tmp_path / "out")])
    assert done.exit_code == 2
    (line,) = done.output.splitlines()
    assert "database or disk is full" in line and "TMPDIR" in line
    assert {path.name for path in tmp_path.iterdir()} == {"run"}
