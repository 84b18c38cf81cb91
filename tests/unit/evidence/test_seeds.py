"""Check intervals over seeds and the sentences generated from them."""

from __future__ import annotations

import pytest

from evidence.seeds import against, seed_interval, seeds_table, seeds_verdict, write_section

CONTROL = "shuffled"
ARMS = {
    "steady": {1: 0.11, 2: 0.12, 3: 0.10},
    "one lucky seed": {1: 0.117, 2: 0.232, 3: 0.082},
    "one seed": {1: 9.0},
    CONTROL: {1: 0.085, 2: 0.021, 3: -0.081},
}


def test_the_interval_is_students_with_a_degree_of_freedom_less_than_seeds():
    interval = seed_interval([1.0, 2.0, 3.0])  # standard error 1 / sqrt(3), t 4.3027 of two degrees
    assert interval.mean == pytest.approx(2.0)
    assert interval.low == pytest.approx(2 - 4.302653 / 3**0.5, abs=1e-5)
    assert interval.high == pytest.approx(2 + 4.302653 / 3**0.5, abs=1e-5)


def test_one_seed_has_no_interval_and_is_clear_of_nothing():
    interval = seed_interval([9.0])
    assert (interval.low, interval.high, interval.is_clear) == (None, None, False)
    assert interval.as_text() == "+9.000 (one seed)"


def test_an_arm_is_held_against_the_control_of_the_same_seed():
    less = against({1: 2.0, 2: 4.0, 7: 100.0}, {1: 1.0, 2: 2.0, 3: 50.0})
    assert less is not None
    assert less.mean == pytest.approx(1.5)  # of seeds 1 and 2
    assert against({1: 1.0}, {2: 1.0}) is None


def test_a_mean_that_one_seed_makes_is_not_clear_of_0():
    table = seeds_table(ARMS, CONTROL).splitlines()
    assert "| +0.110 [+0.085, +0.135] | yes |" in table[2]
    assert "| +0.144 [-0.051, +0.339] | no |" in table[3]
    assert table[5].endswith("| no |  |  |")  # the control is not compared with itself


def test_the_sentence_says_what_the_table_says():
    assert seeds_verdict("Reward", ARMS, CONTROL) == (
        "**Reward.** Rises from the start, clear of 0 over the seeds: *steady* (not shown for one "
        "lucky seed). Rises above *shuffled*, paired by seed: none."
    )


def test_an_arm_that_falls_for_certain_does_not_count_as_one_that_rises():
    falls = {"worse": {1: -0.11, 2: -0.12, 3: -0.10}, CONTROL: {1: 0.0, 2: 0.0, 3: 0.0}}
    assert "clear of 0 over the seeds: none." in seeds_verdict("Reward", falls, CONTROL)


def test_a_page_without_the_marks_of_a_section_gets_it_at_its_end(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("# Page\n\nText.\n", encoding="utf-8")
    write_section("New", "<!-- a -->", "<!-- b -->", "one", page)
    first = page.read_text(encoding="utf-8")
    assert first == "# Page\n\nText.\n\n## New\n\n<!-- a -->\n\none\n\n<!-- b -->\n"
    write_section("New", "<!-- a -->", "<!-- b -->", "two", page)
    assert page.read_text(encoding="utf-8") == first.replace("one", "two")
