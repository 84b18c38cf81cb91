"""Check `scorekit show`: the worst rows, their texts and errors, and the rows without a score."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from scorekit.__main__ import app
from scorekit.report.worst import ScoredRow, WorstRows
from scorekit.rows.read import RowFile
from tests.kits.scored import failed, scored, span, write_several, write_single

RUNNER = CliRunner(env={"COLUMNS": "120", "TERM": "dumb"})
ARABIC, KOREAN, CHINESE = "صباح الخير يا صديقي", "그 집은 빨갛다", "昨天下了大雨"


def show(*arguments: object, code: int = 0) -> str:
    """Return what the command prints, in one text."""
    result = RUNNER.invoke(app, ["show", *map(str, arguments)])
    assert result.exit_code == code, result.output
    return result.output


def lines_of(output: str) -> list[int]:
    """Return the numbers of the rows that are printed, in their order."""
    return [int(line.split()[1]) for line in output.splitlines() if line.startswith("line ")]


def row(src: str, mt: str, metricx: dict, xcomet: dict, **fields: object) -> dict:
    return {"src": src, "mt": mt, **fields, "metricx": metricx, "xcomet": xcomet}


@pytest.fixture
def several(tmp_path: Path) -> Path:
    """Write four rows with two metrics, which disagree about the worst."""
    rows = [
        row("The house.", KOREAN, scored(20.0), scored(0.9, error_spans=[]), id="a", system="s"),
        row("Rain.", CHINESE, scored(2.0), scored(0.1, error_spans=[span(2, 4)])),
        row("Morning.", ARABIC, failed(), scored(0.5, omissions=[span(0, 3)]), ref="صباح"),
        row("<b>x</b>\n", "<script>a</script>", scored(9.0), failed("overlong"), ref=""),
    ]
    return write_several(tmp_path / "out.jsonl", rows)


@given(st.lists(st.one_of(st.none(), st.integers(-9, 9))), st.integers(1, 5), st.booleans())
def test_the_worst_are_the_first_of_all_rows_in_order(
    scores: list[int | None], count: int, is_higher: bool
) -> None:
    worst = WorstRows(count, "m", higher_is_better=is_higher)
    for number, score in enumerate(scores, 1):
        result = failed() if score is None else scored(score)
        worst.add(ScoredRow(number, None, None, {}, {"m": result}))
    numbered = [(score, n) for n, score in enumerate(scores, 1) if score is not None]
    numbered.sort(key=lambda pair: (pair[0] if is_higher else -pair[0], pair[1]))
    assert [row.number for row in worst.rows()] == [n for _, n in numbered][:count]
    assert worst.num_failed == len(scores) - len(numbered)


def test_the_direction_is_that_of_the_metric(several: Path) -> None:
    assert lines_of(show(several)) == [1, 4, 2]  # metricx is the first: 20, 9, 2
    assert lines_of(show(several, "--metric", "xcomet", "--worst", 2)) == [2, 3]
    assert "3 worst of 3 by metricx (lower is better)" in show(several)


def test_each_row_has_its_texts_its_scores_and_its_errors(several: Path) -> None:
    output = show(several, "--metric", "xcomet")
    assert "line 1 (id a)  system s  metricx 20.0000  xcomet 0.9000" in output
    assert KOREAN in output and CHINESE in output
    assert "errors 下了 (MAJOR 0.50)" in output
    assert "omissions Mor (MAJOR 0.50)" in output
    assert "metricx failed (non_finite)" in output


def test_a_row_without_a_score_is_named_and_is_none_of_the_worst(several: Path) -> None:
    output = show(several, "--metric", "xcomet", "--worst", 1)
    assert lines_of(output) == [2]
    assert "Without a score of xcomet, and not among them: 1" in output
    assert "  line 4: overlong: it has none" in output


def test_more_failed_rows_than_are_listed_are_counted(tmp_path: Path) -> None:
    out = write_single(tmp_path / "out.jsonl", [failed()] * 25)
    output = show(out)
    assert "0 worst of 0" in output and output.count("non_finite") == 20
    assert "and 5 more" in output


def test_texts_come_from_the_input_if_it_is_the_one_that_was_scored(tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    samples = [{"src": "one", "mt": "하나"}, {"src": "two", "mt": "둘", "ref": "두 개"}]
    source.write_text("".join(json.dumps(sample) + "\n" for sample in samples))
    digest = RowFile(source).digest()
    results = [scored(0.5), scored(0.1, error_spans=[span(0, 1)])]
    out = write_single(tmp_path / "out.jsonl", results, input=digest)
    output = show(out, "--input", source, "--worst", 1)
    assert "two" in output and "두 개" in output and "one" not in output
    assert "errors 둘 (MAJOR 0.50)" in output
    assert "has no texts. Say --input IN" in show(out, code=2)
    source.write_text(source.read_text().replace("one", "two"))
    assert "is not the file that" in show(out, "--input", source, code=2)


def test_without_a_description_no_input_is_believed(tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text('{"src": "a", "mt": "b"}\n')
    out = write_single(tmp_path / "out.jsonl", [scored(0.5)])
    (tmp_path / "out.jsonl.meta.json").unlink()
    message = show(out, "--better", "higher", "--input", source, code=2)
    assert "out.jsonl.meta.json does not exist" in message


@pytest.mark.parametrize(
    ("service", "task", "numbers"),
    [
        ("metricx", None, [2, 1]),
        ("xcomet", None, [1, 2]),
        ("judge", "mqm", [2, 1]),
        ("judge", "translation_filter", [1, 2]),
    ],
)
def test_an_output_of_one_service_has_its_direction(
    tmp_path: Path, service: str, task: str | None, numbers: list[int]
) -> None:
    texts = {"src": "a", "mt": "b"}
    results = [{**texts, **scored(1.0)}, {**texts, **scored(2.0)}]
    out = write_single(tmp_path / "out.jsonl", results, service=service)
    meta = tmp_path / "out.jsonl.meta.json"
    described = json.loads(meta.read_text())
    if task:
        described["fields"] = {"task": task, "variables": {}, "constants": {}, "id": "id"}
    meta.write_text(json.dumps(described))
    assert lines_of(show(out)) == numbers


def test_a_direction_that_is_not_known_is_asked_for(tmp_path: Path) -> None:
    results = [{"src": "a", "mt": "b", **scored(value)} for value in (1.0, 2.0)]
    out = write_single(tmp_path / "out.jsonl", results, service="ratio")
    assert "Say --better higher or --better lower" in show(out, code=2)
    assert lines_of(show(out, "--better", "lower")) == [2, 1]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "has no results"),
        ('{"src": "a"}\n', "line 1: no result of `scorekit score`"),
        ('{"line": 1, "ok": true, "score": 1}\n{"line": 2}\n', "line 2: no result"),
        ('{"line": 1, "ok": true, "score": "1"}\n', "line 1: no result"),
        ('{"line": 1, "ok": true, "score": NaN}\n', "line 1: no"),
        ('{"line": 1, "ok": false}\n', "line 1: no result"),
        ('{"line": 1, "src": "a", "ok": true, "score": 1, "error_spans": [1]}\n', "error spans"),
        ("not json\n", "line 1: not JSON"),
    ],
)
def test_a_file_of_something_else_is_refused_in_a_line(
    tmp_path: Path, content: str, message: str
) -> None:
    out = tmp_path / "out.jsonl"
    out.write_text(content)
    output = show(out, "--better", "higher", code=2)
    assert message in output and len(output.splitlines()) == 1


def test_a_metric_that_the_file_lacks_is_refused(several: Path) -> None:
    assert "--metric comet:" in show(several, "--metric", "comet", code=2)
    assert "has metricx, xcomet" in show(several, "--metric", "comet", code=2)


def test_what_a_metric_could_not_read_or_place_is_said(tmp_path: Path) -> None:
    unplaced = {"quote": "gone", "of": "mt", "reason": "absent", "severity": "MAJOR"}
    result = scored(0.5, unplaced=[unplaced], windows=[{}, {}])
    result["truncated"]["mt"] = True
    out = write_single(tmp_path / "out.jsonl", [{"src": "a", "mt": "b", **result}])
    output = show(out)
    assert "cut, not read to the end: mt" in output and "scored in 2 windows" in output
    assert "MAJOR in mt: gone (not there)" in output


def test_the_page_replaces_no_file_that_is_read(several: Path) -> None:
    content = several.read_bytes()
    assert "is a file that is read" in show(several, "--html", several, code=2)
    assert several.read_bytes() == content


def test_an_output_may_come_from_stdin(several: Path) -> None:
    lines = several.read_text(encoding="utf-8")
    result = RUNNER.invoke(app, ["show", "-", "--better", "lower", "--worst", "1"], input=lines)
    assert result.exit_code == 0 and lines_of(result.output) == [1], result.output


class Page(HTMLParser):
    """Collects the tags, the marked texts, and the text of a page."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.marked: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data
        if self.tags and self.tags[-1][0] == "mark" and "style" in self.tags[-1][1]:
            self.marked.append(data)
            self.tags.append(("", {}))


def test_the_page_has_the_rows_escaped_and_loads_nothing(several: Path, tmp_path: Path) -> None:
    html = tmp_path / "worst.html"
    assert show(several, "--metric", "xcomet", "--html", html) == f"{html}\n"
    page = Page()
    page.feed(html.read_text(encoding="utf-8"))
    assert page.marked == ["下了", "Mor"]
    assert not {tag for tag, _ in page.tags} & {"script", "link", "img", "iframe", "b"}
    assert not [a for _, a in page.tags if a.keys() & {"src", "href"}]
    for text in (KOREAN, ARABIC, "line 1 (id a)", "overlong: it has none", "0.9000"):
        assert text in page.text
    assert all(a.get("dir") == "auto" for tag, a in page.tags if tag == "dd")


def test_texts_in_the_page_stay_texts(several: Path, tmp_path: Path) -> None:
    page = Page()
    page.feed(Path(show(several, "--html", tmp_path / "w.html").strip()).read_text("utf-8"))
    assert "<script>a</script>" in page.text and "<b>x</b>␊" in page.text
    assert "Without a score of metricx, and not among them: 1" in page.text
