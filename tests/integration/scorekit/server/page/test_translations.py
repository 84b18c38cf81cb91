"""Test the page of a metric in Chromium: the right characters colored, and all fields shown."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from scorekit.server.fake import FakeBackend
from testing.servers import running_service

#: A text, and a part of it that is marked.
TEXTS = {
    "korean": ("저는 어제 학교에 갔습니다.", "학교에"),
    "chinese": ("我昨天去了学校。", "学校"),
    "arabic": ("ذهبت إلى المدرسة أمس.", "المدرسة"),
    "emoji": ("😀👩‍👩‍👧 he wenT 🏫 home", "wenT"),
    "beyond": ("𠮷野家𝄞で食べる", "で食"),
}


def span(text: str, part: str, severity: str = "MAJOR", **fields: object) -> dict:
    start = text.index(part)
    return {
        "start": start,
        "end": start + len(part),
        "severity": severity,
        "confidence": 0.75,
        "text": part,
    } | fields


def score(page, src: str, mt: str) -> None:
    page.fill("textarea[name=src]", src)
    page.fill("textarea[name=mt]", mt)
    page.click("button.go")
    page.wait("document.querySelector('.card .score, .card.failed, .fault:not([hidden])')")


def marked(page, row: int = 1) -> list[str]:
    return page.js(
        f"[...document.querySelectorAll('.card .row')[{row}].querySelectorAll('mark')]"
        ".map((m) => m.textContent)"
    )


@pytest.mark.parametrize("name", TEXTS)
def test_spans_stand_under_the_right_characters(page, backend, name):
    text, part = TEXTS[name]
    backend.plan[text] = {"score": 0.5, "error_spans": [span(text, part)]}
    score(page, "😀 source", text)
    assert marked(page) == [part]
    assert page.js("document.querySelectorAll('.card .text')[1].textContent") == text
    rtl = page.js("getComputedStyle(document.querySelectorAll('.card .text')[1]).direction")
    assert rtl == ("rtl" if name == "arabic" else "ltr")


def test_an_error_tells_of_itself_on_hover_and_on_focus(page, backend):
    text = "one two three"
    spans = [span(text, "one"), span(text, "two", "CRITICAL", category="accuracy", confidence=None)]
    backend.plan[text] = {"error_spans": spans}
    score(page, "s", text)
    tooltip_text = (
        "document.getElementById('tip').hidden ? '' : document.getElementById('tip').innerText"
    )
    x, y = page.js(
        "(() => { const r = document.querySelector('.card mark').getBoundingClientRect();"
        "return [r.x + r.width / 2, r.y + r.height / 2]; })()"
    )
    page.ask("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
    page.wait(f"({tooltip_text}).includes('MAJOR')")
    assert page.js(tooltip_text) == "error: MAJOR · confidence 0.75"
    page.js("document.querySelector('.card mark').focus()")
    page.press("Tab")
    assert page.js(tooltip_text) == "error: CRITICAL · confidence not known · accuracy"
    page.press("Escape")
    assert page.js(tooltip_text) == ""


def test_what_an_error_tells_goes_with_it_where_the_focus_scrolls_the_page(tab, url, backend):
    tab.open(url, width=400, height=500)
    tab.wait("document.getElementById('model').textContent")
    text = "word " * 800
    backend.plan[text] = {"error_spans": [span(text, "word") | {"start": 3990, "end": 3994}]}
    score(tab, "s", text)
    tab.js("scrollTo(0, 0)")
    tab.js("document.querySelector('.card mark').focus()")
    tab.wait("scrollY > 0")
    between = (
        "(() => { const [a, b] = ['.card mark', '#tip'].map((one) => document.querySelector(one)"
        ".getBoundingClientRect()); return Math.max(a.top - b.bottom, b.top - a.bottom); })()"
    )
    # two frames, so that the scrolling has finished
    tab.js("new Promise((r) => requestAnimationFrame(() => requestAnimationFrame(r)))")
    assert not tab.js("document.getElementById('tip').hidden")
    assert tab.js(between) == pytest.approx(6, abs=1)
    tab.js("scrollTo(0, 0)")
    tab.wait("document.getElementById('tip').hidden")


def test_omissions_lost_errors_windows_and_what_was_not_read_are_shown(page, backend):
    src, mt = "😀 First part. Second part.", "Erster Teil. Zweiter 😀 Teil."
    backend.plan[mt] = {
        "score": -3.5,
        "error_spans": [span(mt, "Teil")],
        "omissions": [span(src, "Second")],
        "unplaced": [{"quote": "<i>gone</i>", "of": "mt", "reason": "absent", "severity": "MINOR"}],
        "truncated": {"src": False, "mt": True, "ref": False},
        "mt_covered": mt.rindex(" Teil."),
        "windows": [
            {"src_start": 0, "src_end": 14, "mt_start": 0, "mt_end": 13, "score": -1.0},
            {"src_start": 14, "src_end": 26, "mt_start": 13, "mt_end": 29, "score": -2.5},
        ],
    }
    score(page, src, mt)
    assert (marked(page, 0), marked(page, 1)) == (["Second"], ["Teil"])
    labels = "[...document.querySelectorAll('.card .window')].map((w) => w.dataset.label)"
    assert page.js(labels) == ["1: -1", "2: -2.5"] * 2
    before = (
        "[...document.querySelectorAll('.card .row')[1].querySelectorAll('.window')]"
        ".map((w) => { const r = new Range(); r.setStart(w.parentNode, 0); r.setEndBefore(w);"
        "return r.toString(); })"
    )
    assert page.js(before) == ["", "Erster Teil. "]
    unread = "[...document.querySelectorAll('.card .unread')].map((e) => e.textContent).join('')"
    assert page.js(unread) == " Teil."
    card_text = page.js("document.querySelector('.card').textContent")
    assert "<i>gone</i>" in card_text and "not found there" in card_text
    assert (
        "cut, not read to the end: mt" in card_text
        and "2 windows" in card_text
        and "-3.5" in card_text
    )


def test_what_a_text_says_is_text(page, backend):
    attack = "<img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script>"
    mt = f"bad {attack}"
    category = "<img src=x onerror=document.title='owned'>"
    placed_error = span(mt, attack, category=category)
    unplaced_error = {"quote": attack, "of": "src", "reason": "ambiguous", "severity": "MINOR"}
    backend.plan[mt] = {
        "error_spans": [placed_error],
        "unplaced": [unplaced_error | {"category": category}],
    }
    score(page, attack, mt)
    page.js("document.querySelector('.card mark').focus()")
    assert page.js("document.getElementById('tip').textContent").endswith(category)
    assert (
        page.js("document.querySelectorAll('.results img, .results script, #tip img').length") == 0
    )
    assert page.js("document.querySelector('.card .text').textContent") == attack
    assert page.js("document.title") == "xcomet · scorekit"


def test_a_failed_sample_has_its_error_and_no_number(page):
    score(page, "s", "nan")
    assert page.js("document.querySelector('.card .score')") is None
    results_text = page.js("document.querySelector('.results').textContent")
    assert "failed: non_finite" in results_text and "the model's score is nan" in results_text
    assert "0 of" not in results_text and "mean" not in results_text


def test_a_text_that_is_too_long_is_treated_as_chosen(page):
    page.fill("select[name=overlong]", "error")
    score(page, "s", "word " * 600)
    assert "failed: overlong" in page.js("document.querySelector('.results').textContent")
    page.fill("select[name=overlong]", "truncate")
    score(page, "s", "word " * 600)
    page.wait("document.querySelector('.card .score')")
    assert "cut, not read to the end: src" in page.js("document.querySelector('.card').textContent")


def test_the_same_request_by_curl_and_python_has_the_same_answer(page, url):
    src, mt = 'it\'s "two"\nlines $HOME `id` \\ !', "학교 '에서' \\n 😀\u2028wenT"
    score(page, src, mt)
    displayed_score = float(page.js("document.querySelector('.card .score').textContent"))
    assert page.js("document.querySelector('textarea[name=src]').value") == src
    curl = page.js("document.querySelector('.curl').textContent")
    curl_answer = json.loads(
        subprocess.run(["bash", "-c", curl], capture_output=True, check=True).stdout
    )
    python = page.js("document.querySelector('.python').textContent")
    done = subprocess.run([sys.executable, "-c", python], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    [result] = curl_answer["results"]
    assert result["ok"] and round(result["score"], 4) == displayed_score
    assert "'wenT'" in done.stdout and repr(result["score"]) in done.stdout


def test_a_long_request_by_curl_has_the_same_answer(page):
    # An argument of a command has 128 KiB at most.
    score(page, "JSON\n집은 '😀' $HOME\n" * 5000, "번역")
    displayed_score = float(page.js("document.querySelector('.card .score').textContent"))
    curl = page.js("document.querySelector('.curl').textContent")
    result = subprocess.run(["bash"], input=curl.encode(), capture_output=True, check=True)
    assert round(json.loads(result.stdout)["results"][0]["score"], 4) == displayed_score


def test_what_a_score_means_is_said_and_colours_where_there_are_errors(tab):
    for service, direction, coloured in (("xcomet", "higher", True), ("metricx", "lower", False)):
        with running_service(FakeBackend(service)) as url:
            tab.open(url)
            tab.wait("document.getElementById('model').textContent")
            score(tab, "s", "m")
            status = tab.js("document.querySelector('.results [role=status]').textContent")
            assert status.endswith(f"{direction} is better"), status
            assert tab.js("document.querySelector('.legend').checkVisibility()") == coloured


@pytest.mark.parametrize(
    ("ref_rule", "label", "columns"),
    [("required", "(ref)", "mt and ref,"), ("optional", "(ref), optional", "mt and perhaps ref,")],
)
def test_a_reference_is_asked_for_as_the_model_wants_it(tab, script, ref_rule, label, columns):
    sample_rules = json.dumps({"src": "required", "mt": "required", "ref": ref_rule})
    source = script("dom", "call", "rows", "translations")
    page_text = tab.js(
        "(() => { document.body.innerHTML = '<main id=main></main>';"
        f"{source}; const [one, many] = [oneForm(), manyForm()]; MAIN.append(one.box, many.box);"
        f"one.know({sample_rules}); many.know({sample_rules});"
        "return document.body.textContent; })()"
    )
    assert f"Reference {label}Languages" in page_text and f"src, {columns}" in page_text


def test_it_is_used_without_a_mouse(page, backend):
    mt = "by keys"
    backend.plan[mt] = {"score": 0.25, "error_spans": [span(mt, "keys")]}
    for _ in range(2):  # the radio buttons are one tab stop
        page.press("Tab")
    for text in ("source", mt):
        page.ask("Input.insertText", text=text)
        page.press("Tab")
    while page.js("document.activeElement.textContent") != "Score":  # at most six tab stops
        page.press("Tab")
    page.press("Enter")
    page.wait("document.querySelector('.card .score')")
    page.press("Tab")
    assert (
        page.js("document.activeElement.tagName + document.activeElement.textContent") == "MARKkeys"
    )


#: For each visible text: [contrast with its background, its element].
CONTRASTS = """(() => {
const rgb = (color) => color.match(/[\\d.]+/g).map(Number);
const linear = (v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
const bright = (color) => [0.2126, 0.7152, 0.0722].reduce(
  (sum, share, k) => sum + share * linear(color[k] / 255), 0);
const ground = (one) => {
  const own = rgb(getComputedStyle(one).backgroundColor);
  return own[3] === 0 ? ground(one.parentElement) : own;
};
const opacity = (one) => one ? getComputedStyle(one).opacity * opacity(one.parentElement) : 1;
const found = [];
const walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
while (walk.nextNode()) {
  const one = walk.currentNode.parentElement;
  if (!walk.currentNode.data.trim() || !one.checkVisibility()) continue;
  if (one.closest("script, style, option, button:disabled")) continue;
  const [behind, seen] = [ground(one), opacity(one)];
  const ink = rgb(getComputedStyle(one).color).map((v, k) => v * seen + behind[k] * (1 - seen));
  const [most, least] = [bright(ink), bright(behind)].sort((a, b) => b - a);
  found.push([(most + 0.05) / (least + 0.05), one.outerHTML.slice(0, 90)]);
}
return found; })()"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_text_stands_out_from_what_is_behind_it(tab, url, backend, scheme):
    tab.ask(
        "Emulation.setEmulatedMedia",
        features=[{"name": "prefers-color-scheme", "value": scheme}],
    )
    tab.open(url)
    tab.wait("document.getElementById('model').textContent")
    mt = "minor major critical other unread"
    words = mt.split()[:4]
    backend.plan[mt] = {
        "error_spans": [span(mt, word, word.upper()) for word in words],
        "truncated": {"src": False, "mt": True, "ref": False},
        "mt_covered": mt.index("unread"),
    }
    tab.click("input[value='1']")
    tab.fill("textarea[name=rows]", f"src\tmt\ns\t{mt}\ns\tnan\nbroken")
    tab.click("button.go")
    tab.wait("document.querySelector('.card mark')")
    tab.js("document.querySelectorAll('details').forEach((d) => (d.open = true))")
    tab.js("document.querySelector('.card mark').focus()")
    contrasts = tab.js(CONTRASTS)
    assert len(contrasts) > 30
    # 4.5 to 1: WCAG 2.2, success criterion 1.4.3
    assert [element for contrast, element in contrasts if contrast < 4.5] == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_narrow_screen_shows_all_of_it(tab, url, backend, scheme):
    tab.ask(
        "Emulation.setEmulatedMedia",
        features=[{"name": "prefers-color-scheme", "value": scheme}],
    )
    tab.open(url, width=360)
    tab.wait("document.getElementById('model').textContent")
    mt = "unbroken" * 60
    backend.plan[mt] = {"error_spans": [span(mt, mt)]}
    score(tab, "한" * 300, mt)
    for is_open in tab.js("[...document.querySelectorAll('details')].map((d) => (d.open = true))"):
        assert is_open
    assert tab.js("document.documentElement.scrollWidth") <= 360
    wide = "[...document.querySelectorAll('main *')].filter((e) => !e.closest('pre, dl') && "
    wide += "e.getBoundingClientRect().right > 361).map((e) => e.outerHTML.slice(0, 80))"
    assert tab.js(wide) == []
    ink, ground = tab.js(
        "[getComputedStyle(document.body).color, getComputedStyle(document.body).backgroundColor]"
    )
    brightness = [sum(map(int, c.strip("rgb()").split(", ")[:3])) for c in (ink, ground)]
    assert (brightness[0] > brightness[1]) == (scheme == "dark")
