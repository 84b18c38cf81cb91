"""Check curation decisions: the newest one counts and excludes rows."""

from __future__ import annotations

from pathlib import Path

import pytest

from scorekit.errors import UserError
from trainer.sft.curation_record import CurationRecord, RecordEntry, read_record


def test_a_record_is_read_as_it_was_written(tmp_path: Path) -> None:
    entries = [
        RecordEntry("q", "verify", "keep", "OK"),
        RecordEntry("질문\u2028", "exclude", "drop", "its page is another"),
        RecordEntry("q", "hallucinations", "drop", "luck", "run/1-q-0"),
    ]
    CurationRecord(entries).write(tmp_path / "record.jsonl")
    for path in (tmp_path, tmp_path / "record.jsonl"):
        assert list(read_record(path)) == entries
    CurationRecord().write(tmp_path / "record.jsonl")
    assert not list(read_record(tmp_path))


def test_a_later_decision_replaces_an_earlier_one_of_its_step() -> None:
    record = CurationRecord([RecordEntry("q", "verify", "drop", "GT_ERROR")])
    record.update([RecordEntry("q", "diagnose", "keep", "wrong_page")])
    assert record.dropped("q"), "another step's"
    record.update([RecordEntry("q", "verify", "open", "no verdict: the judge did not answer")])
    assert record.dropped("q"), "a call that failed decides nothing"
    record.update([RecordEntry("q", "verify", "keep", "OK")])
    assert record.dropped("q") is None and record.no_example("q", None) is None


def test_doubt_is_cleared_by_verify_alone() -> None:
    record = CurationRecord([RecordEntry("q", "diagnose", "doubt", "reference_suspected")])
    assert record.no_example("q", "run/1") == "diagnosed: reference_suspected"
    assert record.dropped("q") is None
    record.update([RecordEntry("q", "hallucinations", "keep", "none")])
    assert record.doubted("q")
    record.update([RecordEntry("q", "verify", "keep", "GEN_ERROR")])
    assert record.doubted("q") is None and record.no_example("q", "run/1") is None


def test_an_episode_is_condemned_alone() -> None:
    record = CurationRecord([RecordEntry("q", "hallucinations", "drop", "luck", "run/1")])
    record.update([RecordEntry("q", "hallucinations", "keep", "same_data", "run/2")])
    assert record.no_example("q", "run/1") == "hallucinations: luck"
    assert record.no_example("q", "run/2") is None
    assert record.no_example("q", None) is None and record.no_example("q", "run/3") is None


@pytest.mark.parametrize(
    "line", ["{", "[]", '{"question": "q"}', '{"question": 1, "step": "verify", "verdict": "drop"}']
)
def test_what_is_no_record_is_a_line(line: str, tmp_path: Path) -> None:
    (tmp_path / "record.jsonl").write_text(line + "\n")
    with pytest.raises(UserError, match=r"record\.jsonl, line 1: is no decision"):
        read_record(tmp_path)
    with pytest.raises(UserError, match="cannot be read"):
        read_record(tmp_path / "other")
