"""Check the content of a run's report.html and that all texts are escaped."""

from __future__ import annotations

import json
import re

import pytest

from scorekit.errors import UserError
from trainer.runs.run_log import read_jsonl
from trainer.translation.evaluation.report import write_report
from trainer.translation.evaluation.stats import severity_counts

#: These tests look at the charts (tests/integration/trainer/conftest.py).
DRAWS_CHARTS = (
    "test_each_language_pair_has_its_row",
    "test_advantages_of_the_first_middle_and_last_dump_are_drawn",
    "test_what_is_logged_of_guards_coverage_and_time_is_drawn",
)

HOSTILE = '</script><img src=x onerror="alert(1)">[/b] \x1b[2J 번역'


def _line(i, score, **changes):
    return {
        "id": str(i),
        "src": f"source {i}",
        "mt": "나는 wrong 번역",
        "ref": "옳은 번역",
        "tokens": 5,
        "finish_reason": "eos",
        "metricx_score": score,
        "xcomet_score": 0.5,
        "chrf": 30.0,
        "error_spans": [
            {"start": 3, "end": 8, "severity": "MAJOR", "confidence": 0.75, "text": "wrong"}
        ],
        "error": None,
        **changes,
    }


@pytest.fixture
def run(tmp_path):
    return write_run(tmp_path)


@pytest.fixture(scope="module")
def complete_page(tmp_path_factory):
    """Return the page of the run, drawn once."""
    folder = write_run(tmp_path_factory.mktemp("run"))
    return write_report(folder).read_text(encoding="utf-8")


def write_run(folder):
    (folder / "completions").mkdir()
    stats = {
        "samples": 3,
        "xcomet_score_mean": 0.5,
        "spans_mean": 1.0,
        "spans_MINOR_mean": 0.0,
        "spans_MAJOR_mean": 1.0,
        "spans_CRITICAL_mean": 0.0,
        "bleu": 10.0,
        "bleu_tokenize": "char",
        "completion_length_mean": 5.0,
        "truncated_frac": 0.0,
    }
    evals, dumps = [], {0: [9.0, 8.0, 7.0], 4: [3.0, 8.5, None]}
    for update, scores in dumps.items():
        name = f"completions/eval-{update:06d}.jsonl"
        lines = [_line(i, score) for i, score in enumerate(scores)]
        lines[2]["src"] = lines[2]["mt"] = HOSTILE
        lines[2]["error_spans"] = None
        (folder / name).write_text("".join(json.dumps(line) + "\n" for line in lines))
        evals.append(
            stats
            | {
                "update": update,
                "completions": name,
                "chrf": 20.0 + update,
                "metricx_score_mean": 8.0 - update,
            }
        )
    updates = [
        {"update": i, "metricx_score_mean": 8.0 - i, "kl_ref": None, "policy_loss": 0.1}
        for i in range(1, 5)
    ]
    for name, lines in (("log.jsonl", updates), ("eval.jsonl", evals)):
        (folder / name).write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "config.yaml").write_text("misc:\n  seed: 1 # </pre>\n")
    return folder


def test_the_table_says_what_became_better(run):
    page = write_report(run, notes=["a note"]).read_text(encoding="utf-8")
    rows = dict(re.findall(r"<tr><td>([^<]+)</td>.*?class=\"number (\w*)\">", page, re.S))
    assert rows["MetricX score"] == "better" and rows["chrF (never a reward)"] == "better"
    assert rows["xCOMET score"] == "" and rows["completion length (tokens)"] == ""
    assert "a note" in page and "before and after 4 updates" in page


def test_an_evaluation_that_was_scored_in_part_says_so(run, complete_page):
    assert "Not every source has a score" not in complete_page
    lines = read_jsonl(run / "eval.jsonl")
    middle = lines[0] | {"update": 2, "metricx_coverage": 1.0, "xcomet_coverage": 0.6}
    lines.insert(1, middle)
    (run / "eval.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    page = write_report(run).read_text(encoding="utf-8")
    assert "means are over those that have: xCOMET after update 2 (60%)." in page


def test_spans_are_marked_before_and_after(complete_page):
    page = complete_page
    assert '나는 <mark class="major" title="MAJOR 0.75">wrong</mark> 번역' in page
    assert page.index("source 0") < page.index("Worsened most")  # 9 -> 3 improved most


def test_text_of_a_translation_cannot_break_out(complete_page):
    page = complete_page
    assert "<img" not in page and "<script" not in page and "\x1b" not in page
    assert "&lt;/script&gt;&lt;img src=x" in page
    assert "seed: 1 # &lt;/pre&gt;" in page


def test_the_page_fetches_nothing(complete_page):
    page = complete_page
    outside = re.findall(r'(?:src|href|xlink:href)="(?!#)([^"]*)"|url\((?!#)', page)
    assert not outside
    assert page.count("<svg") == 7  # of the eighteen charts, those that have points


def test_a_killed_runs_torn_last_line_is_left_out(run):
    complete_page = write_report(run).read_text(encoding="utf-8")
    for name in ("log.jsonl", "eval.jsonl"):
        with (run / name).open("ab") as file:
            file.write('{"update": 5, "mt": "번'.encode()[:-1])  # within a character
    assert write_report(run).read_text(encoding="utf-8") == complete_page


def test_a_broken_line_is_named(run):
    lines = (run / "log.jsonl").read_text().split("\n")
    (run / "log.jsonl").write_text("\n".join([lines[0], "{", *lines[2:]]))
    with pytest.raises(UserError, match=r"log.jsonl line 2: not a JSON object"):
        write_report(run)


def test_lines_end_at_newlines_only(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"mt": "a\u2028b\x85"}\n{"mt": 1}', encoding="utf-8")
    assert read_jsonl(tmp_path / "a.jsonl") == [{"mt": "a\u2028b\x85"}, {"mt": 1}]
    assert read_jsonl(tmp_path / "none.jsonl") == []


def test_a_folder_without_a_run_is_a_clear_error(tmp_path):
    with pytest.raises(UserError, match="not a run"):
        write_report(tmp_path)


def test_each_language_pair_has_its_row(run, complete_page):
    """Check that BLEU names its tokenization and that a single pair gets no table."""
    assert "By language pair" not in complete_page
    evals = read_jsonl(run / "eval.jsonl")
    for line in evals:
        of_pair = {key: value for key, value in line.items() if key != "pairs"}
        line["pairs"] = {
            "en-US>ko-KR": of_pair | {"samples": 2},
            "en-US>de-DE": of_pair
            | {"samples": 1, "bleu_tokenize": "13a", "metricx_score_mean": 4.0},
        }
    (run / "eval.jsonl").write_text("".join(json.dumps(line) + "\n" for line in evals))
    page = write_report(run).read_text(encoding="utf-8")
    table = page[page.index("By language pair") : page.index("Curves")]
    korean, german = re.findall(r"<td class=\"name\">(en-US&gt;.*?)</tr>", table, re.S)
    assert "8.000 → 4.000" in korean and "char" in korean and '"better">-4.000' in korean
    assert "4.000 → 4.000" in german and "13a" in german


def test_a_stopped_run_says_why(run, complete_page):
    assert "was stopped" not in complete_page
    lines = read_jsonl(run / "log.jsonl")
    lines[-1]["stopped"] = "KL 2 > 1"
    (run / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    page = write_report(run).read_text(encoding="utf-8")
    assert "was stopped after update 4: KL 2 &gt; 1" in page


def test_advantages_of_the_first_middle_and_last_dump_are_drawn(run):
    for update in range(1, 6):
        rows = [{"advantages": [0.5, -1.0 * update, 0.0]}, {"advantages": None}]
        path = run / f"completions/train-{update:06d}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    page = write_report(run).read_text(encoding="utf-8")
    chart_text = page[page.index("advantages (normalized") :]
    assert re.findall(r"update (\d)</text>", chart_text) == ["1", "3", "5"]


def test_what_is_logged_of_guards_coverage_and_time_is_drawn(run):
    lines = read_jsonl(run / "log.jsonl")
    lines = [
        line | {"guard_copy_mean": 0.1, "kl_ref_k3": 0.2, "reward_coverage": 0.9, "logprob_s": 1.0}
        for line in lines
    ]
    (run / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    page = write_report(run).read_text(encoding="utf-8")
    for title in ("values of the guards", "KL to the reference", "coverage", "seconds of"):
        assert f">{title}" in page, title


def test_spans_are_counted_by_severity():
    """Check counts over the segments whose spans are available."""
    lines = [_line(0, 1.0), _line(1, 2.0, error_spans=None), _line(2, 3.0, error_spans=[])]
    lines[0]["error_spans"] *= 3
    rows = {row.severity: row for row in severity_counts(lines)}
    assert rows["MAJOR"] == ("MAJOR", 3, 1.0, 1, 2)
    assert rows["MINOR"] == ("MINOR", 0, 0.0, 0, 2)
    assert severity_counts(lines[1:2]) == []
