"""Check both formats of judgements and their one-line errors."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scorekit.errors import UserError
from scorekit.metaeval.judgements import read_judgements, remove_marks, weight

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
        ("MINOR", "punctuation", 0.1),  # en-es 2024 has no hierarchy
        ("NEUTRAL", "Other", 0),
        ("MAJOR", "non_translation", 25),
        ("TRIVIAL", "Style", 0.1),
        ("MAJOR", "Source error/-", 0),
        ("MINOR", "Source issue", 0),
        ("MAJOR", "Style/Creative reinterpretation", 0),
    ],
)
def test_errors_weigh_as_in_freitag_2021(severity, category, penalty):
    assert weight(severity, category) == penalty


def test_raters_are_averaged_and_spans_kept_apart(tmp_path):
    spans = [{"start": 0, "end": 1, "severity": "major", "category": "x"}]
    path = _json(tmp_path, _row(rater="1", spans=spans), _row(rater="2"), _row(system="B"))
    first, second = read_judgements(path).translations
    assert (first.score, second.score) == (-2.5, 0)
    assert [len(rating.spans) for rating in first.ratings] == [1, 0]
    assert first.ratings[0].spans[0].severity == "MAJOR" and first.segment == second.segment


def test_a_score_counts_as_it_is_or_turned(tmp_path):
    path = _json(tmp_path, {"src": "s", "mt": "m", "system": "A", "score": 70})
    (translation,) = read_judgements(path).translations
    (turned,) = read_judgements(path, lower_is_better=True).translations
    assert (translation.score, turned.score) == (70, -70) and translation.ratings[0].spans is None


def test_a_source_that_comes_again_is_another_segment_where_its_translation_is_another(tmp_path):
    rows = (_row(mt="one"), _row(mt="two"), _row(mt="one"), _row(system="B", mt="two"))
    first, second, third = read_judgements(_json(tmp_path, *rows)).translations
    assert len(first.ratings) == 2 and first.segment == third.segment != second.segment


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
    # all rows of a translation have the same text except for the marks
    text = path.read_text(encoding="utf-8").replace("mouse</v>\t", "mouse</v>.\t")
    path.write_text(text, encoding="utf-8")
    judged = read_judgements(path)
    rated, unmarked_row = judged.translations
    assert (rated.src, rated.mt, rated.segment, unmarked_row.mt) == (
        *("Das Haus", "the mouse.", "doc/1/1", '"quoted'),
    )
    assert rated.score == pytest.approx(-(5 + 0.1 + 1) / 2)
    first, second = rated.ratings
    assert [(s.start, s.end, s.severity) for s in first.spans] == [
        (4, 9, "MAJOR"),
        (9, 10, "MINOR"),
    ]
    assert second.spans == [] and unmarked_row.score == 0
    assert [note.split(":")[0] for note in judged.notes] == [
        "1 rows that test the raters' attention (HOTW) are left out",
        "1 errors have no mark in the translation",
    ]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"src": "s", "mt": "m", "spans": []}, "line 1: no field 'system'"),
        ({"src": "s", "mt": 3, "system": "A", "spans": []}, "line 1: field 'mt' is not text"),
        ({"src": "s", "mt": "m", "system": "A"}, "line 1: neither 'spans' nor 'score'"),
        (_row(spans=None, score="3"), "line 1: field 'score' is not a number"),
        (_row(spans=None, score=True), "line 1: field 'score' is not a number"),
        (_row(spans=None, score=float("nan")), "line 1: field 'score' is not finite"),
        (_row(spans=None, score=float("-inf")), "line 1: field 'score' is not finite"),
        (_row(spans=None, score=10**400), "line 1: field 'score' is not finite"),
        (_row(spans={"start": 0}), "line 1: field 'spans' is not a list"),
        (_row(ref=3), "line 1: field 'ref' is not text"),
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


def test_what_is_no_fault_of_the_translation_counts_neither_in_score_nor_in_spans(tmp_path):
    rows = [
        _error("the <v>mouse</v>", category="Source error/-", severity="Major"),
        _error("<v>the</v> mouse", category="Style/Creative reinterpretation"),
        _error("the <v>mouse</v>", rater="r2"),
    ]
    judged = read_judgements(_tsv(tmp_path, *rows))
    (translation,) = judged.translations
    assert translation.score == -0.5 and [len(rating.spans) for rating in translation.ratings] == [
        0,
        1,
    ]
    assert judged.notes == ["2 errors of the source, or reinterpretations, count for nothing"]
    span = {"start": 0, "end": 1, "severity": "MAJOR", "category": "Source error"}
    repeated = read_judgements(_json(tmp_path, _row(spans=[span]), _row(mt="b", system="B")))
    assert repeated.translations[0].score == 0 and repeated.translations[0].ratings[0].spans == []
    assert repeated.notes == ["1 errors of the source, or reinterpretations, count for nothing"]


def test_rows_without_a_rater_are_left_out_and_told(tmp_path):
    """Check Marot's rows that have metadata only."""
    judged = read_judgements(_tsv(tmp_path, _error("a", "", "", rater=""), _error("<v>a</v>")))
    assert judged.translations[0].score == -1
    assert judged.notes == ["1 rows without a rater (metadata) are left out"]


def test_a_windows_file_with_a_byte_order_mark_is_the_same(tmp_path):
    rows = _error("the <v>mouse</v>", severity="Major"), _error("the mouse", rater="r2")
    path = _tsv(tmp_path, *rows)
    plain = read_judgements(path)
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes().replace(b"\n", b"\r\n"))
    assert read_judgements(path) == plain and plain.translations[0].mt == "the mouse"


@pytest.mark.parametrize(
    ("cell", "text", "positions"),
    [
        # as in newstest2020: CSV quotes with the marks inside
        ('"""<v>""</v>Die ""E"" Flüssigkeit."', '""Die "E" Flüssigkeit.', [(1, 2)]),
        ('"Er sagte: ""<v>ja</v>"""', 'Er sagte: "ja"', [(11, 13)]),
        # texts that are quoted themselves
        ('"Why <v>does</v> it," I hear.', '"Why does it," I hear.', [(5, 9)]),
        ('"<v>Why</v>?"', '"Why?"', [(1, 4)]),
        ('"a" and "<v>b</v>"', '"a" and "b"', [(9, 10)]),
        ('""', '""', []),
    ],
)
def test_the_quotes_of_a_csv_come_off_and_those_of_a_text_stay(tmp_path, cell, text, positions):
    judged = read_judgements(_tsv(tmp_path, _error(cell, source='"Das ""Haus"""')))
    (translation,) = judged.translations
    assert (translation.src, translation.mt) == ('Das "Haus"', text)
    assert [(span.start, span.end) for span in translation.ratings[0].spans] == positions
    assert any("CSV's quotes" in note for note in judged.notes)


def test_columns_of_every_year_name_the_segment(tmp_path):
    """Check the columns of TED and newstest (doc, doc_id, seg_id) and of Marot.

    Marot has docSegId, a globalSegId that may always be 0, and metadata.
    """
    marot = HEAD.replace("doc_id", "docSegId").replace("seg_id", "globalSegId")
    marot = marot.replace("severity\n", "severity\tmetadata\n")
    rows = [
        ("A", "doc", number, "0", "r", src, mt, "No-error", severity, '{"note": "x"}')
        for number, src, mt, severity in (("1", "s", "a", "no_error"), ("2", "t", "b", "No-error"))
    ]
    first, second = read_judgements(_tsv(tmp_path, *rows, head=marot)).translations
    assert (first.segment, second.segment) == (
        "doc/0/1",
        "doc/0/2",
    ) and first.score == second.score == 0


def test_published_scores_of_a_segment(tmp_path):
    """Check rows of ted/ende, for which mqm_ted_ende.avg_seg_scores.tsv has -1, -5 and -0."""
    positions = [
        ("Facebook-AI", "<v>in Betracht</v>", "Terminology/Inappropriate for context", "Minor")
    ]
    positions += [("HuaweiTSC", "<v>euch</v>", "Fluency/Register", "Major")]
    positions += [("VolcTrans-GLAT", "alle", "No-error", "No-error")]
    head = HEAD.replace("severity\n", "severity\tcomment\n")
    rows = [
        (name, "talk.1", "1", "1", "rater1", "I", mt, *kind, "") for name, mt, *kind in positions
    ]
    translations = read_judgements(_tsv(tmp_path, *rows, head=head)).translations
    assert [translation.score for translation in translations] == [-1, -5, 0]
    assert {translation.segment for translation in translations} == {"talk.1/1/1"}


def test_faults_of_a_published_file(tmp_path):
    with pytest.raises(UserError, match="no column 'severity'"):
        read_judgements(_tsv(tmp_path, head=HEAD.replace("\tseverity", "")))
    with pytest.raises(UserError, match="line 1: the header has no column 'system'"):
        read_judgements(_tsv(tmp_path, _error("a"), head=""))
    with pytest.raises(UserError, match="line 2: 10 columns, the header has 9"):
        read_judgements(_tsv(tmp_path, _error("a\tb")))
    with pytest.raises(UserError, match="line 2: an unpaired <v> or </v>"):
        read_judgements(_tsv(tmp_path, _error("</v>a<v>")))
    with pytest.raises(UserError, match="line 2: a <v> without its </v>"):
        read_judgements(_tsv(tmp_path, _error("the <v>mouse")))
    with pytest.raises(UserError, match="line 2: severity 'WORSE' is none of"):
        read_judgements(_tsv(tmp_path, _error("a", severity="worse")))
    with pytest.raises(UserError, match="two translations of segment 'doc/1/1'"):
        read_judgements(_tsv(tmp_path, _error("a"), _error("b")))
    with pytest.raises(UserError, match="it has no judgements"):
        read_judgements(_tsv(tmp_path))


def test_a_csv_is_refused_by_its_name(tmp_path):
    with pytest.raises(UserError, match=r"in\.csv: judgements are \.jsonl or \.tsv"):
        read_judgements(tmp_path / "in.csv")


@given(st.lists(st.tuples(st.text("a집😀 ", max_size=4), st.text("b中", min_size=1, max_size=4))))
def test_marks_come_off_and_say_where_they_stood(segments):
    text, positions = remove_marks("".join(f"{plain}<v>{wrong}</v>" for plain, wrong in segments))
    assert text == "".join(plain + wrong for plain, wrong in segments)
    assert [text[a:b] for a, b in positions] == [wrong for _, wrong in segments]


def test_a_rater_who_judges_a_translation_twice_is_refused_by_both_lines(tmp_path):
    rows = [_row(rater="r1", score=3), _row(rater="r2", score=9), _row(rater="r1", score=4)]
    with pytest.raises(UserError, match=r"lines 1 and 3: rater 'r1' judges one translation twice"):
        read_judgements(_json(tmp_path, *rows))
    span = {"start": 0, "end": 1, "severity": "major"}
    rows = [_row(rater="r1", spans=[span]), _row(rater="r1", spans=[{**span, "end": 2}])]
    with pytest.raises(UserError, match="lines 1 and 2"):
        read_judgements(_json(tmp_path, *rows))


def test_equal_rows_of_a_rater_count_once_and_are_told(tmp_path):
    empty = {"start": 1, "end": 1, "severity": "minor"}
    row = _row(rater="r1", spans=[{"start": 0, "end": 1, "severity": "major"}, empty])
    judged = read_judgements(_json(tmp_path, row, row, _row(rater="r2")))
    assert [rating.score for rating in judged.translations[0].ratings] == [-6, 0]
    assert "1 equal rows of a rater and a translation count once" in judged.notes
    without_names = read_judgements(_json(tmp_path, _row(score=1), _row(score=1), _row(score=4)))
    assert without_names.translations[0].score == 2 and not without_names.notes


@pytest.mark.parametrize(("name", "texts"), [("src", ("집", "집들")), ("ref", ("house", "home"))])
def test_rows_of_a_translation_that_differ_in_a_text_are_refused_by_both_lines(
    name, texts, tmp_path
):
    rows = [_row(seg_id="1", **{name: text}) for text in texts]
    with pytest.raises(UserError, match=rf"lines 1 and 2: .* has two values of '{name}'"):
        read_judgements(_json(tmp_path, *rows))


def test_two_translations_of_a_segment_are_refused_by_both_lines(tmp_path):
    rows = [_row(seg_id="1"), _row(seg_id="2"), _row(seg_id="1", mt="the house")]
    with pytest.raises(UserError, match="lines 1 and 3: system 'A' has two translations"):
        read_judgements(_json(tmp_path, *rows))
