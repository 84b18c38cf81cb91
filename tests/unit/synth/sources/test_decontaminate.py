"""Check that texts of evaluation sets are detected in sources and translations."""

from __future__ import annotations

import gzip
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from scorekit.errors import UserError
from synth.sources.screen import EvaluationTexts, digests, evaluation_texts

LONG = (
    "The committee met on Tuesday to discuss whether the old bridge over the river should be "
    "repaired or replaced by a new one."
)
MIDDLE = "Nobody had seen the missing blue painting since spring."  # nine words
SHORT = "Good morning to you all."
KOREAN = (
    "위원회는 화요일에 모여 강 위의 낡은 다리를 고칠지 아니면 새로 지을지를 오랫동안 "
    "논의하였다고 한다."
)
CHINESE = "委员会星期二开会讨论河上的旧桥是应该修理还是应该用一座新的来代替。"


@pytest.fixture(scope="module")
def evaluation_set():
    texts = [LONG, MIDDLE, SHORT, KOREAN, CHINESE]
    return EvaluationTexts((text, f"set row {i}") for i, text in enumerate(texts, 1))


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (LONG, "is set row 1"),
        (LONG.upper().replace(" ", "  ").rstrip("."), "is set row 1"),
        ("\u200b".join(LONG), "is set row 1"),
        (SHORT.replace("oo", "o\u00ado\ufeff"), "is set row 3"),
        (f"Last week: {LONG} It rained.", "shares 13 words with set row 1"),
        ("So " + " ".join(LONG.split()[3:16]) + " anyway", "shares 13 words with set row 1"),
        ("So " + " ".join(LONG.split()[3:15]) + " anyway", None),
        (f"He said: {MIDDLE} We left.", "shares 9 words with set row 2"),
        ("He said: " + " ".join(MIDDLE.split()[:8]) + " We left.", None),
        (SHORT, "is set row 3"),
        (f"{SHORT} How are you?", None),
        (f"보도에 따르면 {KOREAN}", "shares 13 words with set row 4"),
        (f"据报道，{CHINESE}天气很好。", "shares 20 characters with set row 5"),
        (f"据报道，{CHINESE[:15]}天气很好。", None),
        ("", None),
        ("?!", None),
    ],
)
def test_what_stands_in_an_evaluation_set_is_found_and_named(evaluation_set, text, reason):
    assert evaluation_set.find(text) == reason


@example(["ab"] * 10 + ["人"] * 11, ["xx"])
@given(
    st.lists(st.sampled_from(["ab", "cd", "ef", "人", "地"]), max_size=60),
    st.lists(st.sampled_from(["xx", "yy"]), max_size=5),
)
def test_a_run_is_found_wherever_it_stands(parts, lead):
    text = " ".join(parts)
    evaluation_set = EvaluationTexts([(text, "here")])
    reason = evaluation_set.find(" ".join([*lead, text]))
    if not lead and parts:
        assert reason == "is here"
    if len(parts) >= 20:
        assert reason is not None


def write(folder):
    rows = [{"id": 1, "translation": {"en": LONG, "ko": KOREAN}}, {"tags": [CHINESE]}]
    (folder / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "b.txt").write_text(f"\n{MIDDLE}\n")
    (folder / "c.txt.gz").write_bytes(gzip.compress(MIDDLE.encode()))
    pq.write_table(pa.table({"src": [LONG], "ref": [KOREAN]}), folder / "d.parquet")


@pytest.mark.parametrize(
    ("name", "text", "reason"),
    [
        ("a.jsonl", KOREAN, "is a.jsonl row 1"),
        ("a.jsonl", CHINESE, "is a.jsonl row 2"),
        ("b.txt", MIDDLE, "is b.txt line 2"),
        ("c.txt.gz", MIDDLE, "is c.txt.gz line 1"),
        ("d.parquet", LONG, "is d.parquet row 1"),
    ],
)
def test_every_text_of_a_file_is_read(tmp_path, name, text, reason):
    write(tmp_path)
    evaluation_set = evaluation_texts([str(tmp_path / name)])
    assert evaluation_set is not None and evaluation_set.find(text) == reason


def test_digests_name_the_content(tmp_path):
    write(tmp_path)
    files = [str(tmp_path / "b.txt"), str(tmp_path / "a.jsonl")]
    before = digests(files)
    assert [digest.partition(":")[0] for digest in before] == ["a.jsonl", "b.txt"]
    (tmp_path / "b.txt").write_text(SHORT)
    assert digests(files)[0] == before[0] and digests(files)[1] != before[1]


def test_no_files_are_no_texts_and_a_missing_one_is_one_clear_line(tmp_path):
    assert evaluation_texts([]) is None
    for name in ("gone.txt", "gone.jsonl", "gone.parquet"):
        with pytest.raises(UserError, match=name):
            digests([str(tmp_path / name)])
    with pytest.raises(UserError, match="ending"):
        digests([str(tmp_path / "set.docx")])
