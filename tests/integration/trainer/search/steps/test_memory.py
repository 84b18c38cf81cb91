"""Check what the curation steps hold in memory, and what they write to temporary files."""

from __future__ import annotations

import tempfile
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from scorekit.errors import UserError
from tests.kits.trainer.searching.curated import (
    make_question,
    outcome_of,
    searched,
    write_run,
)
from trainer.search.steps.sft_rows import SftRowFile

#: Of a small run and a large one, whose questions are the same.
QUESTIONS, FEW, MANY = 40, 1, 40
#: Most bytes that an episode may need: its summary, its id in the decision, and its note.
MAX_BYTES = {"buckets": 900, "focus": 900, "budget": 900, "diagnose": 1800}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """Return samples for each question -> the folder of a run with them."""
    folder = tmp_path_factory.mktemp("runs")
    questions = [make_question(f"q{number}", 1) for number in range(QUESTIONS)]
    return {
        samples: write_run(
            folder / f"{samples}",
            [
                searched(q, n, ndcg=0.5, judge=0.0, answer=f"{n}")
                for q in questions
                for n in range(samples)
            ],
            questions,
        )
        for samples in (FEW, MANY)
    }


@pytest.mark.parametrize("name", MAX_BYTES)
def test_an_episode_needs_a_bounded_number_of_bytes(name: str, runs: dict[int, Path]) -> None:
    few_bytes, many_bytes = (used_bytes(runs[samples], name) for samples in (FEW, MANY))
    per_episode = (many_bytes - few_bytes) / ((MANY - FEW) * QUESTIONS)
    assert 100 < per_episode < MAX_BYTES[name]


def used_bytes(folder: Path, name: str) -> int:
    """Return the bytes that a step needs at most."""
    sizes = []
    for _ in range(2):  # the first fills caches
        tracemalloc.start()
        outcome_of(name, folder)
        sizes.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    return min(sizes)


def row(number: int, length: int) -> dict[str, Any]:
    return {"id": f"가{number}", "input_ids": [number] * length, "more": {"none": None}}


def test_training_rows_come_back_in_any_order_and_do_not_stay_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    rows = SftRowFile()
    tracemalloc.start()
    for number in range(2000):
        rows.put(row(number, 500))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1_500_000, "2,000 rows of 500 ids need 16 MB"
    assert rows.get("가7") == row(7, 500) and rows.get("가3") == row(3, 500)
    rows.put(row(2000, 501))
    assert rows.longest(f"가{number}" for number in (1, 2000)) == 501
    assert rows.longest([]) == 0
    assert list(tmp_path.iterdir()) == [], "no name leads to it"


@pytest.mark.parametrize("fails", ["write", "flush"])
def test_a_full_disk_is_one_line(fails: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = SftRowFile()

    def full(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(rows, "_file", Full(rows._file, {fails: full}))
    with pytest.raises(UserError, match=r"no space for temporary files .*TMPDIR=FOLDER"):
        rows.put(row(1, 2))


class Full:
    """A file some of whose methods are replaced."""

    def __init__(self, file: Any, methods: dict[str, Callable[..., Any]]) -> None:
        self._file, self._methods = file, methods

    def __getattr__(self, name: str) -> Any:
        return self._methods.get(name) or getattr(self._file, name)
