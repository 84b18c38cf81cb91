"""report.html of a run: what it shows, and what cannot break out of it."""

from __future__ import annotations

import json
import re

import pytest

from scorekit.errors import UserError
from trainer.report import write_report
from trainer.runlog import read_jsonl

HOSTILE = '</script><img src=x onerror="alert(1)">[/b] \x1b[2J 번역'


def _line(i, score, **changes):
    return {
        "id": str(i), "src": f"source {i}", "mt": "나는 wrong 번역", "ref": "옳은 번역",
        "tokens": 5, "finish_reason": "eos", "metricx_score": score, "xcomet_score": 0.5,
        "chrf": 30.0,
        "error_spans": [
            {"start": 3, "end": 8, "severity": "MAJOR", "confidence": 0.75, "text": "wrong"}
        ],
        "error": None, **changes,
    }  # fmt: skip


@pytest.fixture
def run(tmp_path):
    (tmp_path / "completions").mkdir()
    figures = {
        "samples": 3, "xcomet_score_mean": 0.5, "spans_mean": 1.0, "spans_MINOR_mean": 0.0,
        "spans_MAJOR_mean": 1.0, "spans_CRITICAL_mean": 0.0, "bleu": 10.0, "bleu_tokenize": "char",
        "completion_length_mean": 5.0, "truncated_frac": 0.0,
    }  # fmt: skip
    evals, dumps = [], {0: [9.0, 8.0, 7.0], 4: [3.0, 8.5, None]}
    for update, scores in dumps.items():
        name = f"completions/eval-{update:06d}.jsonl"
        lines = [_line(i, score) for i, score in enumerate(scores)]
        lines[2]["src"] = lines[2]["mt"] = HOSTILE
        lines[2]["error_spans"] = None
        (tmp_path / name).write_text("".join(json.dumps(line) + "\n" for line in lines))
        evals.append(
            figures | {"update": update, "completions": name, "chrf": 20.0 + update,
                       "metricx_score_mean": 8.0 - update}
        )  # fmt: skip
    updates = [
        {"update": i, "metricx_score_mean": 8.0 - i, "kl_ref": None, "policy_loss": 0.1}
        for i in range(1, 5)
    ]
    for name, lines in (("log.jsonl", updates), ("eval.jsonl", evals)):
        (tmp_path / name).write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "config.yaml").write_text("misc:\n  seed: 1 # </pre>\n")
    return tmp_path


def test_the_table_says_what_became_better(run):
    page = write_report(run, notes=["a note"]).read_text(encoding="utf-8")
    rows = dict(re.findall(r"<tr><td>([^<]+)</td>.*?class=\"number (\w*)\">", page, re.S))
    assert rows["MetricX score"] == "better" and rows["chrF (never a reward)"] == "better"
    assert rows["xCOMET score"] == "" and rows["completion length (tokens)"] == ""
    assert "a note" in page and "before and after 4 updates" in page


def test_spans_are_marked_before_and_after(run):
    page = write_report(run).read_text(encoding="utf-8")
    assert '나는 <mark class="major" title="MAJOR 0.75">wrong</mark> 번역' in page
    assert page.index("source 0") < page.index("Worsened most")  # 9 -> 3 improved most


def test_text_of_a_translation_cannot_break_out(run):
    page = write_report(run).read_text(encoding="utf-8")
    assert "<img" not in page and "<script" not in page and "\x1b" not in page
    assert "&lt;/script&gt;&lt;img src=x" in page
    assert "seed: 1 # &lt;/pre&gt;" in page


def test_the_page_fetches_nothing(run):
    page = write_report(run).read_text(encoding="utf-8")
    outside = re.findall(r'(?:src|href|xlink:href)="(?!#)([^"]*)"|url\((?!#)', page)
    assert not outside
    assert page.count("<svg") == 7  # of the eighteen, those that have points


def test_a_killed_runs_torn_last_line_is_left_out(run):
    whole = write_report(run).read_text(encoding="utf-8")
    for name in ("log.jsonl", "eval.jsonl"):
        with (run / name).open("ab") as file:
            file.write('{"update": 5, "mt": "번'.encode()[:-1])  # within a character
    assert write_report(run).read_text(encoding="utf-8") == whole


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
    with pytest.raises(UserError, match="no run here"):
        write_report(tmp_path)
