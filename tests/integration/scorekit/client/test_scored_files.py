"""Check `scorekit show` and `compare` on what `scorekit score` writes, in a browser, too."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from scorekit.__main__ import app
from scorekit.server.fake import FakeBackend
from testing.servers import running_service
from tests.kits.browser import BROWSER, ask_page
from tests.kits.scored import scored, span, write_several

RUNNER = CliRunner(env={"COLUMNS": "100", "TERM": "dumb"})


def run(*arguments: object) -> str:
    result = RUNNER.invoke(app, list(map(str, arguments)))
    assert result.exit_code == 0, result.output
    return result.stdout


def test_what_score_writes_is_shown_and_compared(tmp_path: Path) -> None:
    """Check a TSV in Korean Windows, whose quotes, encoding and columns the description has."""
    rows = [(n, f"문장 {n}", f'"나쁜 wrong ""{n}"""') for n in range(12)] + [(12, "끝", "nan")]
    with running_service(FakeBackend("xcomet")) as url:
        for name in ("a", "b"):
            lines = [f"{n}\t{src}\t{mt}" for n, src, mt in rows]
            text = "\n".join(["id\t원문\t번역", *lines, ""])
            source = tmp_path / f"{name}.tsv"
            source.write_bytes(text.replace("wrong", "wrong " * (name == "a")).encode("cp949"))
            names = ("--src-field", "원문", "--mt-field", "번역")
            run("score", source, tmp_path / f"{name}.jsonl", "--url", url, *names)
    out = tmp_path / "a.jsonl"
    output = run("show", out, "--input", tmp_path / "a.tsv", "--worst", 12)
    assert "errors wrong (MAJOR" in output and '나쁜 wrong  "3"' in output and "문장 11" in output
    assert "line 14 (id 12): non_finite" in output
    (stat,) = json.loads(run("compare", out, tmp_path / "b.jsonl", "--json"))["figures"]
    results = [
        [json.loads(line) for line in (tmp_path / f"{name}.jsonl").read_text().splitlines()]
        for name in ("a", "b")
    ]
    means = [sum(r["score"] for r in rows if r["ok"]) / 12 for rows in results]
    assert [stat["first"], stat["second"]] == pytest.approx(means)
    assert (stat["sources"], stat["left_out"], stat["first_scored"]) == (12, 1, 12)


@pytest.mark.skipif(BROWSER is None, reason="no Chromium on PATH")
def test_the_page_is_not_wider_than_a_narrow_window(tmp_path: Path) -> None:
    result = {"metricx": scored(1.0), "xcomet": scored(0.5, error_spans=[span(0, 400)])}
    texts = {"id": "i" * 300, "src": "w" * 300, "mt": "설정파일" * 200, "system": "s" * 300}
    out = write_several(tmp_path / "out.jsonl", [{**texts, **result}])
    page = tmp_path / "worst.html"
    run("show", out, "--html", page)
    assert ask_page(tmp_path, page, "document.documentElement.scrollWidth", width=360) == "360"
