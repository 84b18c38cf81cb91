"""Both forms of judgements, and one line for each fault in them."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scorekit.errors import UserError
from scorekit.metaeval.judgements import read_judgements, weight
from scorekit.metaeval.marks import unmarked

HEAD = "system\tdoc\tdoc_id\tseg_id\trater\tsource\ttarget\tcategory\tseverity\n"


def _json(tmp_path, *rows):
    path = tmp_path / "in.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def _row(**other):
    return {"src": "집", "mt": "a house", "system": "A", "spans": []} | other


def _tsv(tmp_path, *rows, head=HEAD):
    path = tmp_path / "in.tsv"
    path.write_text(head + "".join("\t".join(row) + "\n" for row in rows), encoding="utf-8")
    return path


def _error(target, category="Accuracy/Mistranslation", severity="Minor", rater="r1", **other):
    source = other.get("source", "Das Haus")
    return ("A", "doc", "1", other.get("seg", "1"), rater, source, target, category, severity)


@pytest.mark.parametrize(
    ("severity", "category", "penalty"),
    [
        ("MAJOR", "Accuracy/Mistranslation", 5),
        ("MINOR", "Style/Awkward", 1),
        ("MINOR", "Fluency/Punctuation", 0.1),
        ("MAJOR", "Fluency/Punctuation", 5),
        ("MAJOR", "Non-translation!", 25),
        ("NEUTRAL", "Other", 0),
    ],
)
def test_errors_weigh_as_in_freitag_2021(severity, category, penalty):
    assert weight(severity, category) == penalty


def test_raters_are_averaged_and_spans_kept_apart(tmp_path):
    spans = [{"start": 0, "end": 1, "severity": "major", "category": "x"}]
    path = _json(tmp_path, _row(rater="1", spans=spans), _row(rater="2"), _row(system="B"))
    one, other = read_judgements(path).translations
    assert (one.score, other.score) == (-2.5, 0)
    assert [len(rating.spans) for rating in one.ratings] == [1, 0]
    assert one.ratings[0].spans[0].severity == "MAJOR" and one.segment == other.segment


def test_a_score_counts_as_it_is_or_turned(tmp_path):
    path = _json(tmp_path, {"src": "s", "mt": "m", "system": "A", "score": 70})
    (one,) = read_judgements(path).translations
    (turned,) = read_judgements(path, lower_is_better=True).translations
    assert (one.score, turned.score) == (70, -70) and one.ratings[0].spans is None


def test_a_source_that_comes_again_is_another_segment_where_its_translation_is_another(tmp_path):
    rows = (_row(mt="one"), _row(mt="two"), _row(mt="one"), _row(system="B", mt="two"))
    one, two, other = read_judgements(_json(tmp_path, *rows)).translations
    assert len(one.ratings) == 2 and one.segment == other.segment != two.segment


def test_a_published_file(tmp_path):
    path = _tsv(
        tmp_path,
        _error("the <v>mouse</v>", severity="Major"),
        _error("the mouse<v>.</v>", category="Fluency/Punctuation", severity="minor"),
        _error("the mouse.", category="Accuracy/Omission", source="Das <v>Haus</v>"),
        _error("the mouse.", category="No-error", severity="no-error", rater="r2"),
        _error("the mouse", category="x", severity="HOTW-test", rater="r3"),
        _error('"quoted', category="No-error", severity="No-error", seg="2"),
    )
    # the same text stands in all rows of a translation, but for the marks
    text = path.read_text(encoding="utf-8").replace("mouse</v>\t", "mouse</v>.\t")
    path.write_text(text, encoding="utf-8")
    judged = read_judgements(path)
    one, two = judged.translations
    assert (one.src, one.mt, one.segment, two.mt) == ("Das Haus", "the mouse.", "doc/1", '"quoted')
    assert one.score == pytest.approx(-(5 + 0.1 + 1) / 2)
    first, second = one.ratings
    assert [(s.start, s.end, s.severity) for s in first.spans] == [
        (4, 9, "MAJOR"),
        (9, 10, "MINOR"),
    ]
    assert second.spans == [] and two.score == 0
    assert [note.split(":")[0] for note in judged.notes] == [
        "1 rows that test the raters' attention (HOTW) are left out",
        "1 errors have no mark in the translation",
    ]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"src": "s", "mt": "m", "spans": []}, "line 1: no field 'system'"),
        ({"src": "s", "mt": 3, "system": "A", "spans": []}, "line 1: field 'mt' is no text"),
        ({"src": "s", "mt": "m", "system": "A"}, "line 1: neither 'spans' nor 'score'"),
        (_row(spans=None, score="3"), "line 1: field 'score' is no number"),
        (_row(spans=[{"start": 0, "end": 8, "severity": "MINOR"}]), "span 0 to 8 is not in a"),
        (_row(spans=[{"start": 3, "end": 2, "severity": "MINOR"}]), "span 3 to 2 is not in a"),
        (_row(spans=[{"start": 0, "severity": "MINOR"}]), "line 1: a span needs whole numbers"),
        (_row(spans=[{"start": 0, "end": 1, "severity": "bad"}]), "severity 'BAD' is none of"),
    ],
)
def test_a_faulty_row_is_one_line(tmp_path, row, message):
    with pytest.raises(UserError) as error:
        read_judgements(_json(tmp_path, row))
    assert message in str(error.value) and "\n" not in str(error.value)


def test_faults_of_a_published_file(tmp_path):
    with pytest.raises(UserError, match="0 columns 'severity'"):
        read_judgements(_tsv(tmp_path, head=HEAD.replace("\tseverity", "")))
    with pytest.raises(UserError, match="line 2: a <v> without its </v>"):
        read_judgements(_tsv(tmp_path, _error("the <v>mouse")))
    with pytest.raises(UserError, match="line 2: severity 'WORSE' is none of"):
        read_judgements(_tsv(tmp_path, _error("a", severity="worse")))
    with pytest.raises(UserError, match="two translations of segment 'doc/1'"):
        read_judgements(_tsv(tmp_path, _error("a"), _error("b")))
    with pytest.raises(UserError, match="no judgement in it"):
        read_judgements(_tsv(tmp_path))


@given(st.lists(st.tuples(st.text("a집😀 ", max_size=4), st.text("b中", min_size=1, max_size=4))))
def test_marks_come_off_and_say_where_they_stood(pieces):
    text, places = unmarked("".join(f"{plain}<v>{wrong}</v>" for plain, wrong in pieces))
    assert text == "".join(plain + wrong for plain, wrong in pieces)
    assert [text[a:b] for a, b in places] == [wrong for _, wrong in pieces]
