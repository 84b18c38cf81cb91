"""Check that the marks at the end of a turn go, and that the ends of ordinary texts stay."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from scorekit.text.end_marks import without_end_marks

DATA = Path(__file__).parents[3] / "data/end_marks"
DESIGN = yaml.safe_load((DATA / "design.yaml").read_text(encoding="utf-8"))
HELD_OUT = yaml.safe_load((DATA / "held_out.yaml").read_text(encoding="utf-8"))


@pytest.mark.parametrize("mark", DESIGN["marks"])
def test_an_end_mark_goes(mark):
    assert without_end_marks(f"안녕하세요.{mark}") == "안녕하세요."
    assert without_end_marks(f"안녕하세요.\n{mark} {mark}\n") == "안녕하세요.\n"
    assert without_end_marks(f"{mark}안녕하세요.") == f"{mark}안녕하세요."


@pytest.mark.parametrize("ending", [*DESIGN["ordinary"], *HELD_OUT["ordinary"]])
def test_an_ordinary_ending_stays(ending):
    assert without_end_marks(ending) == ending
    assert without_end_marks(f"{ending} \n") == f"{ending} \n"
    assert without_end_marks(f"{ending}<|im_end|>") == ending


def test_most_marks_that_were_held_out_go():
    missed = {mark for mark in HELD_OUT["marks"] if without_end_marks(f"a{mark}") != "a"}
    assert missed <= {"<|plamo:op|>", "<|im_sep_end|>", "<|endofchunk|>", "</longcat_s>"}


def test_a_closing_tag_of_html_stays_and_the_mark_behind_it_goes():
    assert without_end_marks("<s>10</s></s>") == "<s>10</s>"
    assert without_end_marks("<s>10</s> 9</s> </s>") == "<s>10</s> 9"


def test_marks_that_are_given_are_the_only_ones():
    assert without_end_marks("a </s> @@ @@", ["@@"]) == "a </s> "
    assert without_end_marks("a </s>", [""]) == "a </s>"


def test_a_text_of_marks_alone_is_empty():
    assert without_end_marks(" </s><eos> <pad>" * 20_000) == " "
