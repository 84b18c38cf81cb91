"""Check `scorekit compare`: which rows belong together, what is refused, and the numbers."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from scorekit.__main__ import app
from scorekit.paired import comparison_values
from tests.kits.scored import failed, scored, write_several, write_single
from trainer.runs.stats import StatSpec, compare_lines

RUNNER = CliRunner(env={"COLUMNS": "80", "TERM": "dumb"})
RANDOM = random.Random(3)
FIRST = [round(RANDOM.random(), 3) for _ in range(40)]
SECOND = [round(value + RANDOM.gauss(0.1, 0.1), 3) for value in FIRST]


def compare(*arguments: object, code: int = 0) -> str:
    result = RUNNER.invoke(app, ["compare", *map(str, arguments)])
    assert result.exit_code == code, result.output
    return result.output


def values_of(*arguments: object) -> dict[str, Any]:
    return json.loads(compare(*arguments, "--json"))


def write(path: Path, scores: list[float | None], **options: Any) -> Path:
    results = [failed() if score is None else scored(score) for score in scores]
    return write_single(path, results, **options)


def test_the_numbers_are_those_of_an_evaluation(tmp_path: Path) -> None:
    """Check that a trainer's comparison.json of the same scores has the same numbers."""
    a, b = write(tmp_path / "a.jsonl", FIRST), write(tmp_path / "b.jsonl", SECOND)
    table = [
        StatSpec(key="xcomet", title="xcomet", better="higher", value_of_row=lambda row: row["s"])
    ]
    lines = [[{"s": score} for score in scores] for scores in (FIRST, SECOND)]
    (expected,) = comparison_values(("", ""), {}, compare_lines(table, *lines))["figures"]
    (stat,) = values_of(a, b)["figures"]
    assert expected.items() <= stat.items()
    assert stat["verdict"] == "better" and stat["low"] > 0


def test_rows_that_one_side_failed_are_left_out_of_both_means(tmp_path: Path) -> None:
    a = write(tmp_path / "a.jsonl", [None, 0.2, 0.4, 0.6])
    b = write(tmp_path / "b.jsonl", [0.9, 0.4, 0.6, None])
    (stat,) = values_of(a, b)["figures"]
    assert (stat["sources"], stat["left_out"]) == (2, 2)
    assert (stat["first"], stat["second"]) == pytest.approx((0.3, 0.5))
    assert [
        stat[f"{side}_{name}"] for side in ("first", "second") for name in ("scored", "rows")
    ] == [3, 4, 3, 4]
    assert stat["low"] is None
    output = compare(a, b)
    assert "3 / 4" in output and "2 (-2)" in output and "fewer than 10 pairs" in output


def test_a_narrow_terminal_cuts_no_number(tmp_path: Path) -> None:
    a, b = write(tmp_path / "a.jsonl", FIRST), write(tmp_path / "b.jsonl", SECOND)
    narrow = RUNNER.invoke(app, ["compare", str(a), str(b)], env={"COLUMNS": "30"})
    assert "…" not in narrow.output and narrow.output == compare(a, b)


def test_rows_are_joined_by_id_if_each_has_its_own(tmp_path: Path) -> None:
    ids = [f"seg-{n}" for n in range(40)]
    order = RANDOM.sample(range(40), 40)
    a = write(tmp_path / "a.jsonl", FIRST, ids=ids)
    b = write(tmp_path / "b.jsonl", [SECOND[n] for n in order], ids=[ids[n] for n in order])
    values = values_of(a, b)
    by_line = values_of(write(tmp_path / "a2.jsonl", FIRST), write(tmp_path / "b2.jsonl", SECOND))
    assert (values["joined_by"], by_line["joined_by"]) == ("id", "line")
    for name in ("difference", "low", "high", "worse"):
        assert values["figures"][0][name] == pytest.approx(by_line["figures"][0][name])


@pytest.mark.parametrize("ids", [["x", "x", "y"], ["x", None, "y"]])
def test_rows_are_joined_by_line_if_an_id_recurs_or_lacks(tmp_path: Path, ids: list[Any]) -> None:
    a = write(tmp_path / "a.jsonl", FIRST[:3], ids=["x", "z", "y"])
    b = write(tmp_path / "b.jsonl", SECOND[:3], ids=ids)
    assert values_of(a, b)["joined_by"] == "line"


def test_a_number_and_its_text_are_one_id(tmp_path: Path) -> None:
    a = write(tmp_path / "a.jsonl", FIRST[:3], ids=[1, 2, 3])
    b = write(tmp_path / "b.jsonl", SECOND[:3], ids=["3", "2", "1"])
    values = values_of(a, b)
    assert (values["joined_by"], values["pairs"]) == ("id", 3)


def test_rows_of_one_side_alone_are_counted(tmp_path: Path) -> None:
    a = write(tmp_path / "a.jsonl", FIRST[:4], ids=[1, 2, 3, 4])
    b = write(tmp_path / "b.jsonl", SECOND[:3], ids=[3, 4, 5])
    assert values_of(a, b)["unpaired"] == [2, 1]
    output = compare(a, b)
    assert "only in A, and left out: 2 rows" in output and "only in B, and left out: 1" in output
    other = write(tmp_path / "c.jsonl", SECOND[:3], ids=[7, 8, 9])
    assert "no id is in both" in compare(a, other, code=2)


@pytest.mark.parametrize("name", ["service", "model", "revision", "dtype"])
def test_scores_of_different_models_are_refused(tmp_path: Path, name: str) -> None:
    a, b = write(tmp_path / "a.jsonl", FIRST), write(tmp_path / "b.jsonl", SECOND, **{name: "new"})
    output = compare(a, b, code=2)
    assert len(output.splitlines()) == 1 and "new" in output


def test_scores_with_different_options_are_refused(tmp_path: Path) -> None:
    a, b = write(tmp_path / "a.jsonl", FIRST), write(tmp_path / "b.jsonl", SECOND)
    meta = tmp_path / "b.jsonl.meta.json"
    meta.write_text(meta.read_text().replace('"options": {}', '"options": {"overlong": "window"}'))
    assert "options" in compare(a, b, code=2)


def test_what_could_not_be_checked_is_said(tmp_path: Path) -> None:
    a, b = write(tmp_path / "a.jsonl", FIRST), write(tmp_path / "b.jsonl", SECOND)
    assert "sources are equal was not checked" in compare(a, b)
    for name in ("a", "b"):
        (tmp_path / f"{name}.jsonl.meta.json").unlink()
    assert "Say --better" in compare(a, b, code=2)
    output = compare(a, b, "--better", "higher")
    assert f"models are equal was not checked: {a} has no .meta.json" in output


def several(path: Path, system: str = "s", **changes: Any) -> Path:
    """Write rows with two metrics: the same scores, of which one is the lower the better."""
    rows = [
        {"src": f"{n}", "mt": "m", "system": system, "metricx": scored(x), "xcomet": scored(x)}
        for n, x in enumerate(FIRST if system == "s" else SECOND)
    ]
    rows[3] |= changes
    return write_several(path, rows)


def test_each_metric_has_a_row_and_its_direction(tmp_path: Path) -> None:
    a, b = several(tmp_path / "a.jsonl"), several(tmp_path / "b.jsonl", "t")
    metricx, xcomet = values_of(a, b)["figures"]
    assert (metricx["key"], xcomet["key"]) == ("metricx", "xcomet")
    assert metricx["difference"] == xcomet["difference"]
    assert (metricx["verdict"], xcomet["verdict"]) == ("worse", "better")
    assert metricx["worse"] == pytest.approx(1 - xcomet["worse"])
    assert [stat["key"] for stat in values_of(a, b, "--metric", "xcomet")["figures"]] == ["xcomet"]
    assert "--metric comet" in compare(a, b, "--metric", "comet", code=2)
    output = compare(a, b)
    assert "lower is better: metricx" in output and "not checked" not in output


def test_rows_of_different_sources_are_refused(tmp_path: Path) -> None:
    a, b = several(tmp_path / "a.jsonl"), several(tmp_path / "b.jsonl", "t", src="another")
    assert "line 4: different sources. Rows are joined by line" in compare(a, b, code=2)


def test_systems_of_one_file_are_compared_with_the_baseline(tmp_path: Path) -> None:
    parts = [several(tmp_path / f"{name}.jsonl", name) for name in ("t", "s", "u")]
    rows = [json.loads(line) for path in parts for line in path.read_text().splitlines()]
    out = write_several(tmp_path / "all.jsonl", rows)
    comparisons = [
        json.loads(line) for line in compare(out, "--baseline", "s", "--json").splitlines()
    ]
    assert [(c["first"], c["second"], c["joined_by"]) for c in comparisons] == [
        ("s", "t", "order"),
        ("s", "u", "order"),
    ]
    two_files = values_of(tmp_path / "s.jsonl", tmp_path / "t.jsonl")
    assert comparisons[0]["figures"] == two_files["figures"]
    assert "A: s\nB: t" in compare(out, "--baseline", "s")
    assert "has the systems t, s, u" in compare(out, "--baseline", "x", code=2)


def test_systems_without_ids_and_with_other_counts_are_refused(tmp_path: Path) -> None:
    result = {"metricx": scored(1.0), "xcomet": scored(1.0)}
    rows = [{"src": "a", "system": name, **result} for name in "sst"]
    out = write_several(tmp_path / "all.jsonl", rows)
    assert "s has 2 rows, t 1, and no ids join them" in compare(out, "--baseline", "s", code=2)
    rows[1] |= {"system": None}
    write_several(out, rows)
    assert "line 2: has no `system`" in compare(out, "--baseline", "s", code=2)


def test_a_file_alone_or_two_with_a_baseline_are_refused(tmp_path: Path) -> None:
    a = several(tmp_path / "a.jsonl")
    assert "name a second file" in compare(a, code=2)
    assert "name a second file" in compare(a, a, "--baseline", "s", code=2)


def test_files_without_a_common_metric_are_refused(tmp_path: Path) -> None:
    a, b = write(tmp_path / "a.jsonl", FIRST), write(tmp_path / "b", SECOND, service="metricx")
    assert f"{a} has xcomet, {b} has metricx" in compare(a, b, code=2)


def test_the_table_fits_into_80_columns(tmp_path: Path) -> None:
    a, b = several(tmp_path / "a.jsonl"), several(tmp_path / "b.jsonl", "t")
    output = compare(a, b)
    (row,) = (line for line in output.splitlines() if line.startswith(" xcomet"))
    assert "…" not in output and row.split()[1] == "40"
    assert row.split()[-1] == "100.0%"  # B wins
    assert "lower is better: metricx" in output and "higher is better: xcomet" in output


def test_the_table_of_many_rows_fits_too(tmp_path: Path) -> None:
    rows = 1200
    a, b = (
        write(tmp_path / name, [None, *[RANDOM.random() for _ in range(rows - 1)]])
        for name in ("a.jsonl", "b.jsonl")
    )
    lines = compare(a, b).splitlines()
    (start,) = (n for n, line in enumerate(lines) if line.startswith(" xcomet"))
    assert lines[start].split()[1:3] == ["1199", "(-1)"] and "…" not in "".join(lines)
    assert [line.split() for line in lines[start + 1 : start + 3]] == [
        ["1,199", "1,199"],
        ["/", "1,200", "/", "1,200"],
    ]
