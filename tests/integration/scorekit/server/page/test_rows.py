"""Test many rows: pasted or of a file, requests in parts, sorting, filters, CSV and JSONL out."""

from __future__ import annotations

import ast
import csv
import io
import json
import subprocess
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from tests.kits.browser.live import GATE
from tests.kits.examples import examples

#: One tab for many examples.
many = settings(
    max_examples=examples(60), suppress_health_check=[HealthCheck.function_scoped_fixture]
)
texts = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\ufeff"), max_size=12)
awkward = st.lists(
    st.sampled_from(["a", "\t", '"', "\n", "\r\n", "😀", "한", "=", ",", "'", "م"]), max_size=8
).map("".join)


def run(tab, source: str, expression: str, value: object = None) -> object:
    """Evaluate an expression over parts of the page's script, and over `given`."""
    # In an object literal, __proto__ is no key.
    json_value = f"JSON.parse({json.dumps(json.dumps(value))})"
    return tab.js(f"(() => {{ {source}; const given = {json_value}; return {expression} }})()")


@many
@given(st.lists(st.tuples(texts | awkward, texts | awkward), min_size=1, max_size=3))
def test_what_is_saved_is_what_was_answered_and_no_formula(tab, script, rows):
    items = [
        {"sample": {"src": s, "mt": m}, "result": {"ok": True, "score": -1.5, "error_spans": []}}
        for s, m in rows
    ]
    items.append({"sample": {"src": "s", "mt": "m"}, "result": None, "line": 9, "id": "=x"})
    saved = run(tab, script("rows"), "[asCsv(given), asJsonl(given)]", items)
    assert saved[0].startswith("\ufeffrow,src,mt,ref,ok,score,")
    lines = list(csv.DictReader(io.StringIO(saved[0][1:], newline="")))
    for line, (src, mt) in zip(lines, rows, strict=False):
        for got, given_text in ((line["src"], src), (line["mt"], mt)):
            assert got in (given_text, f"'{given_text}")
            assert not got.startswith(tuple("=+-@\t\r\n＝＋－＠"))
        assert (line["ok"], line["score"], line["error_spans"]) == ("true", "-1.5", "[]")
    assert (lines[-1]["score"], lines[-1]["error_type"]) == ("", "cancelled")
    assert (lines[-1]["line"], lines[-1]["id"]) == ("9", "'=x")
    saved_rows = [json.loads(line) for line in saved[1].split("\n")[:-1]]
    assert [row["src"] for row in saved_rows] == [*(src for src, _ in rows), "s"]
    assert saved_rows[-1]["ok"] is False and "score" not in saved_rows[-1]
    assert (saved_rows[-1]["line"], saved_rows[-1]["id"]) == (9, "=x")


@many
@given(
    texts, st.lists(st.tuples(st.integers(0, 12), st.integers(1, 6), st.integers(0, 2))), st.data()
)
def test_each_character_has_the_colour_of_the_gravest_error_over_it(
    tab, script, text, span_specs, data
):
    names = ("MINOR", "MAJOR", "CRITICAL")
    spans = [
        {"start": a, "end": a + n, "severity": names[g], "confidence": None}
        for a, n, g in span_specs
        if a + n <= len(text)
    ]
    covered = data.draw(st.none() | st.integers(0, 14))
    colored = run(
        tab,
        script("dom", "marks"),
        """(() => { const made = markedText(given.text, given); const found = [];
        const walk = (node, kind, unread) => { for (const one of node.childNodes) {
          if (one.nodeType === 3) for (const c of one.data) found.push([c, kind, unread]);
          else if (one.tagName === "MARK") walk(one, one.className, unread);
          else if (one.className !== "quiet") walk(one, kind, one.className === "unread"); } };
        walk(made, "", false); return found; })()""",
        {"text": text, "spans": spans, "covered": covered, "borders": [[2, "w"]] if text else []},
    )
    expected = []
    for k, letter in enumerate(text):
        over = [names.index(s["severity"]) for s in spans if s["start"] <= k < s["end"]]
        kind = names[max(over)].lower() if over else ""
        expected.append([letter, kind, covered is not None and k >= covered])
    assert colored == expected


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | texts | awkward,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=8,
)


@many
@given(json_values)
@example({"__proto__": None})
def test_python_reads_the_same_values(tab, script, value):
    assert ast.literal_eval(run(tab, script("code"), "pythonOf(given)", value)) == value


@many
@given(st.lists(texts.map(lambda text: text.replace("\0", "")) | awkward, min_size=1, max_size=3))
def test_a_shell_reads_the_same_words(tab, script, words):
    quoted = run(tab, script("code"), "given.map(shellQuoted).join(' ')", words)
    result = subprocess.run(
        ["sh", "-c", f"printf '%s\\0' {quoted}"], capture_output=True, check=True
    )
    assert result.stdout.decode().split("\0")[:-1] == words


def paste(page, rows: list[tuple[str, str]]) -> None:
    page.click("input[value='1']")
    page.fill("textarea[name=rows]", "\n".join("\t".join(row) for row in [("src", "mt"), *rows]))
    page.click("button.go")


def scores(page) -> list[float]:
    return page.js("[...document.querySelectorAll('.card .score')].map((s) => +s.textContent)")


def test_rows_are_scored_in_pieces_sorted_and_filtered(page, backend):
    backend.batches.clear()
    rows = [(f"s{k}", "nan" if k % 50 == 7 else f"글 {k}") for k in range(230)]
    paste(page, rows)
    page.wait("document.querySelector('[role=status]').textContent.startsWith('230 of 230')")
    assert "5 failed" in page.js("document.querySelector('[role=status]').textContent")
    assert "over 225" in page.js("document.querySelector('[role=status]').textContent")
    page.fill("select[name=order]", "worst")
    assert scores(page) == sorted(scores(page)) and len(scores(page)) == 225
    assert page.js("document.querySelectorAll('.card')[229].classList.contains('failed')")
    page.fill("select[name=order]", "best")
    assert scores(page) == sorted(scores(page), reverse=True)
    page.fill("select[name=filter]", "failed")
    numbers = "[...document.querySelectorAll('.card .head > .quiet')].map((e) => e.textContent)"
    assert page.js(numbers) == ["#8", "#58", "#108", "#158", "#208"]
    assert scores(page) == []


def test_it_can_be_stopped_and_gone_on_with(page, backend):
    backend.hold()
    paste(page, [(f"t{k}", f"번역 {k}") for k in range(3)])
    page.wait("!document.querySelector('.running').hidden")
    page.click("button", "Stop")
    page.wait("document.querySelector('.results .fault').innerText.startsWith('Stopped.')")
    assert "0 of 3 answered" in page.js("document.querySelector('.results').textContent")
    assert "mean" not in page.js("document.querySelector('.results').textContent")
    backend.go.set()
    page.click(".results .fault button", "Try again")
    page.wait("document.querySelectorAll('.card .score').length === 3")


#: The saved files by name.
SAVED = """(() => { globalThis.saved = {}; let made;
URL.createObjectURL = (blob) => { made = blob; return "data:,"; };
HTMLAnchorElement.prototype.click = function () { saved[this.download] = made; }; })()"""


def test_a_service_that_goes_in_the_middle_costs_nothing_that_is_done(page):
    page.js(GATE)
    page.js(SAVED)
    page.js("gate = (url, n) => { if (n > 4) throw new TypeError('gone'); }")
    paste(page, [(f"s{k}", "nan" if k == 7 else f"글 {k}") for k in range(1000)])
    page.wait("document.querySelector('.results .fault').innerText.startsWith('No answer from ')")
    results_text = page.js("document.querySelector('.results').innerText")
    assert "400 of 1000 answered, 1 failed" in results_text and "over 399" in results_text
    assert page.js("document.querySelectorAll('.card .score').length") == 399
    page.click("button", "Download CSV")
    page.click("button", "Download JSONL")
    lines = list(csv.DictReader(io.StringIO(page.js("saved['scores.csv'].text()"), newline="")))
    kinds = [""] * 7 + ["non_finite"] + [""] * 392 + ["cancelled"] * 600
    assert [line["error_type"] for line in lines] == kinds
    assert [line["score"] == "" for line in lines] == [bool(kind) for kind in kinds]
    results_text = [
        json.loads(saved_row) for saved_row in page.js("saved['scores.jsonl'].text()").splitlines()
    ]
    assert [saved_row["ok"] for saved_row in results_text] == [not kind for kind in kinds]
    first = "saved['scores.csv'].arrayBuffer().then((b) => [...new Uint8Array(b).slice(0, 3)])"
    assert bytes(page.js(first)) == b"\xef\xbb\xbf"  # Excel detects UTF-8 by it
    page.js("globalThis.sent = []; gate = (url, n) => { sent.push(n); }")
    page.click(".results .fault button", "Try again")
    page.wait("document.querySelectorAll('.card .score').length === 999")
    assert page.js("sent") == [6, 7, 8, 9, 10, 11]  # the failed row is not requested again


def test_a_row_keeps_focus_and_place_while_others_are_scored(page):
    page.js(GATE)
    page.js("gate = (url, n) => n === 1 ? null : new Promise((go) => { globalThis.go = go; })")
    paste(page, [(f"s{k}", "wenT wrong") for k in range(150)])
    page.wait("globalThis.go && document.querySelectorAll('.card .score').length === 100")
    page.js("globalThis.mark = document.querySelectorAll('.card mark')[3]; mark.focus()")
    assert page.js("document.activeElement === mark")
    page.js("go()")
    page.wait("document.querySelectorAll('.card .score').length === 150")
    assert page.js("document.activeElement === mark && !document.getElementById('tip').hidden")
    numbers = "[...document.querySelectorAll('.head > :first-child')].map((e) => e.textContent)"
    assert page.js(numbers) == [f"#{k}" for k in range(1, 151)]


def choose_file(page, path: Path, content: bytes) -> None:
    """Choose a file, and wait until the page tells of it."""
    path.write_bytes(content)
    page.js("document.querySelector('.told').hidden = true")
    root = page.ask("DOM.getDocument")["root"]["nodeId"]
    node = page.ask("DOM.querySelector", nodeId=root, selector="input[type=file]")["nodeId"]
    page.ask("DOM.setFileInputFiles", files=[str(path)], nodeId=node)
    page.wait("!document.querySelector('.told').hidden")


def cards(page) -> list[list[str]]:
    """Return the texts of each card."""
    texts = "[...card.querySelectorAll('.text, .why')].map((e) => e.textContent)"
    return page.js(f"[...document.querySelectorAll('.card')].map((card) => {texts})")


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "cp949"])
def test_columns_are_taken_by_name_in_any_encoding_and_none_is_guessed(page, tmp_path, encoding):
    page.click("input[value='1']")
    text = "번호\t원문\t번역문\r\n1\t안녕하세요\tHello\r\n"
    choose_file(page, tmp_path / "in.tsv", text.encode(encoding))
    message = page.js("document.querySelector('.try .fault').innerText")
    assert "line 1: the header has no column 'src', but '번호', '원문', '번역문'" in message
    assert message.endswith("perhaps src is '원문' and mt is '번역문'")
    assert ("cp949" in page.js("document.querySelector('.notes').innerText")) == (
        encoding == "cp949"
    )
    page.click("button.go")  # nothing is scored
    page.click(".told button", "Take src from “원문”, mt from “번역문”")
    page.wait("document.querySelector('.told').innerText.includes('1 row.')")
    assert page.js("document.querySelector('.try .fault').hidden")
    assert not cards(page)
    page.fill("[name=column-id]", "번호")
    page.wait("document.querySelector('[name=column-id]').value === '번호'")
    page.click("button.go")
    page.wait("document.querySelector('.card .score')")
    assert cards(page) == [["안녕하세요", "Hello"]]


def test_a_column_before_the_source_moves_nothing_and_bad_rows_fail_alone(page, tmp_path):
    page.js(SAVED)
    page.click("input[value='1']")
    content = b"ID;Src;mt;note\n7;a;b;x\n;;;\n8;c;;\nbroken\n"
    choose_file(page, tmp_path / "in.csv", content)
    text = page.js("document.querySelector('.told').innerText")
    for words in (
        "3 rows; 1 of them cannot be scored; 1 without a translation.",
        "in.csv: blank rows are skipped: 1",
        "line 5: 1 columns, the header has 4",
        "Not used: note",
    ):
        assert words in text
    selected = "[...document.querySelectorAll('.told select')].map((one) => one.value)"
    assert page.js(selected) == ["Src", "mt", "", "ID"]
    page.click("button.go")
    page.wait("document.querySelectorAll('.card .score').length === 2")
    assert cards(page) == [["a", "b"], ["c", "(empty)"], ["1 columns, the header has 4"]]
    page.click("button", "Download JSONL")
    rows = [json.loads(row) for row in page.js("saved['scores.jsonl'].text()").splitlines()]
    assert [(row["line"], row["id"], row["ok"]) for row in rows] == [
        (2, "7", True),
        (4, "8", True),
        (5, None, False),
    ]


def test_a_pasted_text_takes_the_place_of_a_file(page, tmp_path):
    choose_file(page, tmp_path / "in.csv", b"src,mt\na,b\n")
    paste(page, [("c", "d")])
    page.wait("document.querySelector('.card .score')")
    assert cards(page) == [["c", "d"]]
    assert page.js("document.querySelector('input[type=file]').files.length") == 0
    page.fill("textarea[name=rows]", "c\td")  # without a header
    page.wait("!document.querySelector('.try .fault').hidden")
    assert "no column 'src', but 'c', 'd'" in page.js("document.querySelector('.try').innerText")


def test_rows_that_are_too_large_are_not_sent(page):
    page.js("globalThis.sent = 0; globalThis.fetch = async () => { sent++; }")
    page.click("input[value='1']")
    page.fill("textarea[name=rows]", "src\tmt\n" + "한" * 350_000)
    page.wait("!document.querySelector('.try .fault').hidden")
    assert "larger than this page takes" in page.js("document.querySelector('.try').innerText")
    assert page.js("sent") == 0
