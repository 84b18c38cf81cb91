"""Check that users' rows become questions with gold pages or give a one-line error."""

from __future__ import annotations

import json
from unicodedata import normalize

import pyarrow
import pyarrow.parquet
import pytest

from scorekit.errors import UserError
from trainer.search.config import SearchData
from trainer.search.data import (
    check_gold,
    gold_pages,
    hold_against_index,
    in_both,
    load_questions,
    question_from_row,
    question_row,
)
from trainer.search.records import Question, answer_parts

ROW = {
    "id": "q1",
    "question": "How many people lived in Peru?",
    "reference_answer": "24 million",
    "file_name": "decks/population.pdf",
    "reference_page": 3,
}


def written(folder, *rows):
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), "utf-8")
    return str(path)


def load(folder, *rows, **settings):
    return load_questions(written(folder, *rows), SearchData(**settings))


def refused(folder, *rows, **settings):
    with pytest.raises(UserError) as raised:
        load(folder, *rows, **settings)
    return " ".join([str(raised.value), *raised.value.lines])


@pytest.mark.parametrize(
    ("file_name", "pages", "ids"),
    [
        ("deck.pdf", (1,), ("deck_1",)),
        ("a/b/deck.PDF", (2, 10), ("deck_2", "deck_10")),
        ("c:\\files\\deck.pdf", (1,), ("deck_1",)),
        ("deck.v2.pdf", (1,), ("deck.v2_1",)),
        ("deck.v2", (1,), ("deck.v2_1",)),
        ("인구 통계.pdf", (3, 3), ("인구 통계_3",)),
        (normalize("NFD", "인구.pdf"), (1,), ("인구_1",)),
        ("deck.pdf", (), ()),
    ],
)
def test_gold_pages_are_named_by_the_files_stem_and_the_page(file_name, pages, ids):
    assert gold_pages(file_name, pages) == ids


@pytest.mark.parametrize("cell", [[3, 5], "3, 5", "[3, 5]", ["3", 5.0], [3, 5, 3]])
def test_reference_pages_are_read_however_a_file_holds_them(tmp_path, cell):
    (question,) = load(tmp_path, ROW | {"reference_page": cell})
    assert question.reference_pages == (3, 5)
    assert question.gold == ("population_3", "population_5")


@pytest.mark.parametrize("cell", [0, -1, 1.5, "three", True, [None, "x"], {"a": 1}])
def test_a_page_that_is_no_whole_number_from_one_is_refused(tmp_path, cell):
    assert "reference_page: expected a whole number >= 1" in refused(
        tmp_path, ROW | {"reference_page": cell}
    )


def test_the_seeds_parquet_is_read_as_it_is(tmp_path):
    info = {"question": "누가?", "file_name": "덱.pdf", "reference_page": [1, 2], "index": 7}
    row = {
        "data_source": "slidevqa",
        "prompt": [{"role": "user", "content": "Question: 누가?"}],
        "reward_model": {"ground_truth": "김 씨", "style": "rule"},
        "extra_info": info,
    }
    path = tmp_path / "train.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row]), path)
    (question,) = load_questions(str(path), SearchData())
    assert (question.id, question.question, question.reference_answer) == ("7", "누가?", "김 씨")
    assert question.gold == ("덱_1", "덱_2")


def test_a_column_that_the_config_names_counts_before_the_usual_ones(tmp_path):
    row = ROW | {"meta": {"q": "Another one?"}}
    (question,) = load(tmp_path, row, columns={"question": "meta.q"})
    assert question.question == "Another one?"
    with pytest.raises(ValueError, match="unknown field 'querry'"):
        SearchData(columns={"querry": "q"})


def test_a_row_may_have_turns_and_a_temperature_of_its_own(tmp_path):
    row_fields = {"max_turns": 15, "temperature": "0.5", "extra_info": {"n_agent": 16}}
    first, second = load(tmp_path, ROW | row_fields, ROW | {"id": "b"})
    assert (first.max_turns, first.temperature, first.n_agent) == (15, 0.5, 16)
    assert (second.max_turns, second.temperature, second.n_agent) == (None, None, None)
    assert "max_turns: expected a whole number >= 1" in refused(tmp_path, ROW | {"max_turns": 0})
    assert "n_agent: expected a whole number >= 1" in refused(tmp_path, ROW | {"n_agent": 0})
    assert "temperature: expected a number >= 0" in refused(tmp_path, ROW | {"temperature": -0.1})


def test_alternatives_belong_to_a_gold_page(tmp_path):
    (question,) = load(tmp_path, ROW | {"alternatives": ["b_1", "b_1", "population_3"]})
    assert question.alternatives == {"population_3": ("b_1",)}
    (question,) = load(tmp_path, ROW | {"alternatives": '{"population_3": ["b_2"]}'})
    assert question.alternatives == {"population_3": ("b_2",)}
    assert "'b_1' is not a gold page (population_3)" in refused(
        tmp_path, ROW | {"alternatives": {"b_1": []}}
    )


def test_every_wrong_row_has_its_line(tmp_path):
    empty, number = {**ROW, "id": "2", "question": " "}, {**ROW, "id": "3", "question": 3}
    message = refused(tmp_path, ROW, empty, number)
    assert "2 of 3 rows cannot be used" in message
    assert "line 2: no question" in message
    assert "line 3: question: expected a text, not int" in message
    assert "no reference_answer" in refused(tmp_path, {"question": "Why?"})
    assert "required: a file_name for these pages" in refused(tmp_path, {**ROW, "file_name": ""})
    assert "ids occur more than once, 'q1'" in refused(tmp_path, ROW, ROW)


def test_rows_without_ids_get_ones_that_stay(tmp_path):
    bare = {key: value for key, value in ROW.items() if key != "id"}
    first = load(tmp_path, bare, bare)
    assert len({question.id for question in first}) == 2
    assert load(tmp_path, bare, bare) == first


def test_a_gold_page_that_the_index_has_not_is_refused_or_left_out(tmp_path, caplog):
    rows = [ROW, ROW | {"id": "q2", "reference_page": 9}, ROW | {"id": "q3"}]
    questions = load(tmp_path, *rows)
    looked_up = []

    def has_page(name):
        looked_up.append(name)
        return name == "population_3"

    with pytest.raises(UserError, match="1 of 3 questions name a page that is not in") as raised:
        hold_against_index(questions, has_page, SearchData())
    assert raised.value.lines == ("q2: the index has no page 'population_9'",)
    assert sorted(looked_up) == ["population_3", "population_9"]
    accepted = hold_against_index(questions, has_page, SearchData(missing_gold="leave_out"))
    assert [question.id for question in accepted] == ["q1", "q3"]
    assert "population_9" in caplog.text
    with pytest.raises(UserError, match="no question remains"):
        hold_against_index(questions, lambda _: False, SearchData(missing_gold="leave_out"))


def test_questions_without_gold_are_told_before_anything_is_asked(tmp_path, caplog):
    bare = {"id": "q2", "question": "Why?", "reference_answer": "so"}
    with pytest.raises(UserError, match=r"1 of 1 questions name no gold page.*weight 0\.2"):
        check_gold(load(tmp_path, bare), 0.2)
    check_gold(load(tmp_path, bare), 0.0)
    check_gold(load(tmp_path, ROW), 0.2)
    assert not caplog.text
    check_gold(load(tmp_path, ROW, bare), 0.2)
    assert "1 of 2 questions name no gold page" in caplog.text


def test_what_is_held_out_and_learned_from_all_the_same_is_told():
    def question_of(id, text, *gold):
        return Question(id=id, question=text, reference_answer="x", gold=gold)

    train = [question_of("a", "How much?", "sales_2024_3"), question_of("b", "Who?", "staff_1")]
    same, near = (
        question_of("c", " How  much? ", "other_1"),
        question_of("d", "When?", "sales_2024_9"),
    )
    new = question_of("e", "Where?", "map_1")
    warning = in_both("data.eval", train, [same, near, new])
    assert "1 of 3 questions stand in data.train, too (first c)" in warning
    assert "1 of 3 questions are on documents of data.train (first 'sales_2024')" in warning
    assert in_both("data.eval", train, [new]) == ""


def test_a_question_has_several_right_answers_of_text_numbers_and_lists(tmp_path):
    answers = ["24 million", 24000000, 18.5, ["White", "10%"], "24 million"]
    first, second, third = load(
        tmp_path,
        ROW | {"reference_answers": answers},
        {**ROW, "id": "b", "reference_answer": 7},
        {"id": "c", "question": "Which?", "reference_answers": '[["a", "b"], "b and a"]'},
    )
    assert first.reference_answer == "24 million"
    assert first.other_answers == ("24000000", "18.5", '["White", "10%"]')
    assert [answer_parts(answer) for answer in first.reference_answers[2:]] == [
        None,
        ["White", "10%"],
    ]
    assert first.reference_text == '24 million | 24000000 | 18.5 | ["White", "10%"]'
    assert second.reference_answers == ("7",)
    assert third.reference_answers == ('["a", "b"]', "b and a")


@pytest.mark.parametrize(
    ("cells", "problem"),
    [
        ({"reference_answer": ["a", "b"]}, "Put several right answers into reference_answers"),
        ({"reference_answers": ["a", " "]}, "reference_answers: an answer in it is empty"),
        ({"reference_answers": [["a", ""]]}, "a part of the answer is empty"),
        ({"reference_answers": [True]}, "expected a text, not bool"),
        ({"reference_answers": "[1,"}, "reference_answers: not JSON"),
        ({"gold_pages": ["a_1"]}, "gold_pages and reference_page both name gold pages"),
        ({"gold_pages": [3], "reference_page": None}, "expected a list of page ids"),
    ],
)
def test_answers_and_pages_that_cannot_be_read_are_refused(tmp_path, cells, problem):
    assert problem in refused(tmp_path, ROW | cells)


def test_gold_pages_of_several_documents_are_named_by_their_ids(tmp_path):
    row = {"question": "Which?", "reference_answer": "x", "gold_pages": ["a_1", "인구_2", "a_1"]}
    (question,) = load(tmp_path, row)
    assert question.gold == ("a_1", "인구_2")
    assert load(tmp_path, question_row(question)) == [question]


def test_a_stored_question_without_further_answers_is_read(tmp_path):
    stored = '{"id": "q", "question": "Who?", "reference_answer": "Kim", "gold": ["a_1"]}'
    assert Question.model_validate_json(stored).reference_answers == ("Kim",)


@pytest.mark.parametrize(
    "cells",
    [
        {"id": "a\ud800"},
        {"gold_pages": ["a\ud800"]},
        {"gold_pages": ["a"], "alternatives": {"a": ["b\ud800"]}},
    ],
    ids=["id", "gold", "alternative"],
)
def test_an_id_that_cannot_be_stored_is_refused(cells):
    with pytest.raises(UserError, match="lone surrogate"):
        question_from_row({"question": "How long?", "reference_answer": "82", **cells})


def test_bad_rows_are_skipped_if_the_config_says_so(tmp_path, caplog):
    path = tmp_path / "rows.jsonl"
    rows = [ROW, {**ROW, "id": "2", "question": " "}, {**ROW, "id": "3"}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows) + "no JSON\n")
    questions = load_questions(str(path), SearchData(bad_rows="skip"))
    assert [question.id for question in questions] == [ROW["id"], "3"]
    messages = [record.getMessage() for record in caplog.records]
    assert "2 of 4 rows cannot be used, and are left out" in messages[0]
    assert "line 2: no question" in messages[1] and "line 4: not JSON" in messages[2]
