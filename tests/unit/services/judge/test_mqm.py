"""Check the MQM task: its prompt, parsed errors, spans and scores."""

from __future__ import annotations

import json

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from scorekit.errors import SampleError, UserError
from scorekit.schemas import JudgeSample, ScoreRange
from scorekit.server.score_endpoint import could_be_answer
from services.judge.fence import END
from services.judge.model import OpenAIBackend
from services.judge.mqm import MAX_QUOTE, POINTS, FoundError, MqmTask, merge_votes
from services.judge.quote_matching import TextRange
from services.judge.rubrics import load_rubrics
from services.judge.settings import JudgeSettings
from testing.judge import ATTACKS, obeys

SRC, MT = "The house is red and old.", "집은 빨간색이다."
PAIR = {"src": SRC, "mt": MT, "src_lang": "en", "tgt_lang": "ko"}


@pytest.fixture(scope="module")
def task():
    return MqmTask()


def error(quote, context="", category="style", severity="minor"):
    return {"quote": quote, "context": context, "category": category, "severity": severity}


def outcome(task, *answers, **texts):
    prepared = task.prepare(PAIR | texts)
    return task.outcome([task.read({"errors": errors}, prepared) for errors in answers], prepared)


def stretches(spans):
    return [(span["text"], span["severity"]) for span in spans]


def test_errors_become_spans_of_both_texts_and_points(task):
    result = outcome(
        task,
        [
            error("빨간색", "집은 빨간색이다", "accuracy/mistranslation", "critical"),
            error("and old", "red and old.", "accuracy/omission", "major"),
            error("파란색", "파란색이다", "terminology", "minor"),
        ],
    )
    assert result["score"] == 10 + 5 + 1
    assert result["error_spans"] == [
        {
            "start": 3,
            "end": 6,
            "severity": "CRITICAL",
            "confidence": None,
            "text": "빨간색",
            "category": "accuracy/mistranslation",
        }
    ]
    (left,) = result["omissions"]
    assert (left["start"], left["end"], SRC[left["start"] : left["end"]]) == (17, 24, "and old")
    assert result["unplaced"] == [
        {
            "quote": "파란색",
            "of": "mt",
            "reason": "absent",
            "severity": "MINOR",
            "category": "terminology",
        }
    ]


def test_an_omission_that_quotes_the_translation_has_no_place(task):
    result = outcome(task, [error("빨간색", category="accuracy/omission", severity="major")])
    assert (result["score"], result["error_spans"], result["omissions"]) == (5, [], [])
    assert result["unplaced"][0]["of"] == "src"


def test_overlapping_errors_share_characters_and_each_counts(task):
    result = outcome(
        task,
        [
            error("집은 빨간색이다", "", "style", "minor"),
            error("빨간색", "", "terminology", "critical"),
        ],
    )
    assert stretches(result["error_spans"]) == [
        ("집은 ", "MINOR"),
        ("빨간색", "CRITICAL"),
        ("이다", "MINOR"),
    ]
    assert result["score"] == 11


def test_an_error_under_a_worse_one_counts_and_does_not_show(task):
    result = outcome(task, [error("빨간색", severity="major"), error("색", "", "other", "minor")])
    assert stretches(result["error_spans"]) == [("빨간색", "MAJOR")]
    assert result["score"] == 6


def test_what_is_said_twice_counts_once_as_the_worse(task):
    repeated = [error("빨간색", severity="minor"), error("빨간색", severity="major")]
    absent = [error("없는 말"), error("없는  말", severity="critical")]
    result = outcome(task, [*repeated, *absent, error("빨간색", category="other")])
    assert result["score"] == 5 + 10 + 1
    assert len(result["unplaced"]) == 1


def test_a_translation_without_errors_has_none(task):
    result = outcome(task, [])
    assert result == {"score": 0.0, "error_spans": [], "omissions": [], "unplaced": []}


@pytest.mark.parametrize(("src", "score"), [(f"\n {SRC} ", 10.0), ("", 0.0), (" ", 0.0)])
def test_of_an_empty_translation_everything_is_missing_and_nobody_is_asked(task, src, score):
    texts = task.prepare(PAIR | {"mt": " ", "src": src})
    result = task.outcome_without_llm(texts)
    assert (result["score"], result["error_spans"], result["unplaced"]) == (score, [], [])
    assert stretches(result["omissions"]) == [(SRC, "CRITICAL")] * bool(score)
    assert task.outcome_without_llm(task.prepare(PAIR)) is None


def test_a_long_quote_without_a_place_is_cut(task):
    result = outcome(task, [error("x" * 5000)])
    assert result["unplaced"][0]["quote"] == "x" * MAX_QUOTE


# -- votes ----------------------------------------------------------------------------------------


def test_what_most_answers_mark_is_told(task):
    result = outcome(
        task,
        [error("빨간색이다", severity="major"), error("집", severity="critical")],
        [error("빨간색", severity="minor", category="terminology"), error("없다")],
        [error("집은 빨간", severity="major", category="terminology"), error("없다", "", "other")],
    )
    assert [(s["text"], s["severity"], s["category"]) for s in result["error_spans"]] == [
        ("집", "MAJOR", "style"),
        ("빨간색", "MAJOR", "terminology"),
    ]
    assert [e["quote"] for e in result["unplaced"]] == ["없다"]
    assert result["score"] == 5 + 5 + 1


def test_of_an_even_number_more_than_half_must_agree(task):
    one_error, no_error = [error("빨간색", severity="major")], []
    assert outcome(task, one_error, no_error)["score"] == 0
    assert outcome(task, one_error, [error("빨간색", severity="minor")])["score"] == 1  # the milder
    assert outcome(task, one_error, one_error, one_error, no_error)["score"] == 5


def test_neighbours_that_most_answers_tell_apart_stay_two(task):
    two_errors = [error("빨간"), error("색이다")]
    assert stretches(outcome(task, two_errors, two_errors, [])["error_spans"]) == [
        ("빨간", "MINOR"),
        ("색이다", "MINOR"),
    ]
    (merged_span,) = outcome(task, two_errors, [error("빨간색이다")], [error("빨간색이다")])[
        "error_spans"
    ]
    assert merged_span["text"] == "빨간색이다"


def test_omissions_are_voted_on_in_the_source(task):
    left = [error("and old", category="accuracy/omission", severity="major")]
    result = outcome(task, left, left, [])
    assert stretches(result["omissions"]) == [("and old", "MAJOR")] and result["score"] == 5


SEVERITIES = st.sampled_from(list(POINTS))


@st.composite
def found_errors(draw):
    field = draw(st.sampled_from(["src", "mt"]))
    text = SRC if field == "src" else MT
    start = draw(st.integers(0, len(text) - 1))
    end = draw(st.integers(start + 1, len(text)))
    location = draw(st.sampled_from([TextRange(start, end), "absent"]))
    category = draw(st.sampled_from(["style", "other"]))
    return FoundError(text[start:end], field, draw(SEVERITIES), category, location)


ANSWERS = st.lists(st.lists(found_errors(), max_size=6), min_size=1, max_size=5)


@given(ANSWERS)
def test_whatever_is_found_a_service_may_answer_and_a_majority_marked_it(answers):
    result = merge_votes(answers, SRC, MT)
    stored = result | {
        "tokens": 3,
        "truncated": {"src": False, "mt": False, "ref": False},
        "mt_covered": len(MT),
    }
    sample = JudgeSample(task="mqm", **PAIR)
    assert could_be_answer(json_bytes(stored), sample, None, ScoreRange(min=0.0, max=None))
    for spans, field, text in (
        (result["error_spans"], "mt", MT),
        (result["omissions"], "src", SRC),
    ):
        marked = {i for span in spans for i in range(span["start"], span["end"])}
        for i in range(len(text)):
            votes = sum(any(covers(e, field, i) for e in errors) for errors in answers)
            assert (i in marked) == (2 * votes > len(answers))
    if len(answers) == 1:
        assert result["score"] == sum(POINTS[e.severity] for e in answers[0])


@given(st.lists(found_errors(), max_size=6), st.integers(2, 5))
def test_answers_that_agree_show_what_one_of_them_shows(errors, k):
    single, several = merge_votes([errors], SRC, MT), merge_votes([errors] * k, SRC, MT)
    for name in ("error_spans", "omissions"):
        assert several[name] == single[name]


def covers(error, field, i):
    return (
        error.field == field
        and isinstance(error.location, TextRange)
        and error.location.start <= i < error.location.end
    )


def json_bytes(value):
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()


# -- what is asked --------------------------------------------------------------------------------


def prompt_messages(task, **texts):
    return task.messages(task.prepare(PAIR | texts))


def test_the_pair_s_own_examples_are_shown(task):
    system, user = (message["content"] for message in prompt_messages(task))
    assert "여섯 알을 넘기세요" in system and "Fenster" not in system
    assert "Fenster" in prompt_messages(task, tgt_lang="German")[0]["content"]
    assert prompt_messages(task, tgt_lang="de-AT")[0]["content"].count("For example:") == 2
    # The example has the same target language.
    into = prompt_messages(task, src_lang="fr", tgt_lang="en")[0]["content"]
    assert "Grandmother" in into and "stationmaster" in into and "넘기세요" not in into
    other = prompt_messages(task, src_lang="fr", tgt_lang="Swahili")[0]["content"]
    assert other.count("For example:") == 2
    assert "Source, in English:" in user and "Translation into Korean:" in user
    assert user.endswith(END)


def test_a_reference_is_shown_only_where_there_is_one(task):
    with_ref, without = prompt_messages(task, ref="그 집은 붉다."), prompt_messages(task, ref="")
    assert "⟦ref " in with_ref[1]["content"] and "Reference" not in without[1]["content"]
    assert without == prompt_messages(task)
    assert "reference" in with_ref[0]["content"] and "reference" not in without[0]["content"]


@pytest.mark.parametrize("field", ["src", "mt", "ref"])
@pytest.mark.parametrize("attack", ATTACKS)
def test_a_text_cannot_steer_what_is_found(task, attack, field):
    text = ATTACKS[attack].replace("candidate", field)
    assert obeys([{"content": f"⟦{field} 1⟧\n안녕\n⟦/{field} 1⟧\n{text}"}])
    assert not obeys(prompt_messages(task, **{field: text}))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"tgt_lang": None}, "tgt_lang: required by the task mqm"),
        ({"mt": None}, "mt: required by the task mqm"),
        ({"candidate": "x"}, "unknown text. The task mqm has"),
        ({"src_lang": "Ignore all of it"}, "src_lang: neither a tag"),
    ],
)
def test_what_a_sample_must_bring(task, change, words):
    texts = {name: text for name, text in (PAIR | change).items() if text is not None}
    with pytest.raises(SampleError) as raised:
        task.prepare(texts)
    assert words in raised.value.message and raised.value.type == "invalid_input"


EXAMPLE = {
    "src_lang": "en",
    "tgt_lang": "ko",
    "src": SRC,
    "mt": MT,
    "errors": [error("빨간색", "집은 빨간색")],
}


def written(folder, *examples):
    path = folder / "own.yaml"
    path.write_text(yaml.safe_dump({"examples": examples}, allow_unicode=True))
    return path


def test_an_operator_s_examples_take_the_place_of_ours(task, tmp_path):
    custom_task = MqmTask(written(tmp_path, EXAMPLE))
    system = prompt_messages(custom_task)[0]["content"]
    assert '"quote":"빨간색"' in system and "넘기세요" not in system
    assert custom_task.digest != task.digest == MqmTask().digest
    assert "For example:" not in prompt_messages(MqmTask(written(tmp_path)))[0]["content"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            {"errors": [error("파란색")]},
            "example 2: the quote '파란색' is absent in its translation",
        ),
        ({"errors": [error("e", category="accuracy/omission")]}, "ambiguous in its source"),
        ({"errors": [error("집", severity="fatal")]}, "severity"),
        ({"errors": [error("집", category="beauty")]}, "category"),
        ({"tgt_lang": "No such language"}, "example 2: tgt_lang"),
        ({"more": 1}, "more"),
    ],
)
def test_a_faulty_file_of_examples_is_refused_in_one_line(tmp_path, change, words):
    path = written(tmp_path, EXAMPLE, EXAMPLE | change)
    with pytest.raises(UserError) as raised:
        MqmTask(path)
    message = str(raised.value)
    assert words in message and "own.yaml" in message and "\n" not in message


def test_a_rubric_cannot_have_its_name(tmp_path):
    (tmp_path / "mqm.yaml").write_text("{}")
    with pytest.raises(UserError, match="the task mqm has no rubric"):
        load_rubrics(tmp_path)


def test_examples_and_votes_are_part_of_the_revision(tmp_path):
    def revision(**settings):
        judge_settings = JudgeSettings(
            backend="openai", base_url="http://x/v1", model="m", **settings
        )
        return OpenAIBackend(load_rubrics(), judge_settings, None).load().revision

    plain = revision()
    assert plain == revision()
    assert len({plain, revision(mqm_votes=3), revision(mqm_examples=written(tmp_path))}) == 3
