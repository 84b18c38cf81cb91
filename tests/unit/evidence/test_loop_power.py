"""Check the table of the page on the loop that says how many seeds would show a gain."""

from __future__ import annotations

import pytest

from evidence.loop.power import BEGIN, COMPARISONS, END, PAGE, differences, rows_of, table


def measurements(**arms: list[float]) -> list[dict]:
    """Return the measurements of arms on the final test, and one of another set."""
    rows = [
        {"question": f"final_test: reward, {name}", "details": {"seeds": values}}
        for name, values in arms.items()
    ]
    return [*rows, {"question": "held_out: reward, loop", "details": {"seeds": [9.0, 9.0]}}]


def test_a_difference_is_paired_by_seed_and_of_the_set_that_is_named() -> None:
    lines = measurements(loop=[0.5, 0.3], plain=[0.2, 0.4])
    assert differences(lines, "loop", "plain") == pytest.approx([0.3, -0.1])
    with pytest.raises(KeyError):
        differences(lines, "loop", "plain", "held_out")


def test_a_wider_spread_and_a_smaller_gain_need_more_seeds() -> None:
    arms = {arm for rows in COMPARISONS.values() for _, *pair in rows for arm in pair}
    results = {
        name: measurements(
            **{arm: [0.15, 0.35, 0.25] if arm == "online" else [0.2] * 3 for arm in arms}
        )
        for name in COMPARISONS
    }
    rows = {row[0]: row[1:] for row in rows_of(results)}
    spread = rows["online budgets, less equal budgets"]
    assert spread[:3] == ["+0.050 [-0.198, +0.298]", "3", "0.100"]
    assert [int(cell) for cell in spread[3:]] == [199, 34, 10]
    assert rows["SFT on rare successes, less none"][2:] == ["0.000", "2", "2", "2"]


def test_the_page_has_the_table_of_the_results() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert text.partition(BEGIN)[2].partition(END)[0].strip() == table()
