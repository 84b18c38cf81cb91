"""Test the pages of the judge, the embedder and the retriever in Chromium."""

from __future__ import annotations

import io
import json

import httpx
import pytest
from PIL import Image
from pydantic import SecretStr

from scorekit.server.settings import Secrets
from services.judge.model import RulesBackend
from services.judge.rubrics import load_rubrics
from services.retriever.backends.bm25 import Bm25Builder
from services.retriever.index.ingest import ingest
from services.retriever.model import RetrieverBackend
from testing.fake_embedder import FakeEmbedder
from testing.servers import running_service
from tests.kits.browser.live import GATE
from tests.kits.retrieval.pdf import draw_pdf

CARD = "(document.querySelector('.card')?.textContent ?? '')"
FAULT = "document.querySelector('.fault:not([hidden])')?.innerText"


@pytest.fixture(scope="module")
def judge():
    with running_service(RulesBackend(load_rubrics(None), 1000)) as url:
        yield url


def test_a_verdict_is_shown_with_its_reason(tab, judge):
    tab.open(judge)
    input_texts = {
        "source_lang": "en",
        "target_lang": "ko",
        "source_text": "The house is red.",
        "candidate": "집은 빨간색이다.",
    }
    for name, text in input_texts.items():
        tab.fill(f"textarea[name={name}]", text)
    tab.click("button.go")
    tab.wait(f"({CARD}) !== ''")
    assert tab.js(CARD).startswith("pass1ok")
    tab.fill("textarea[name=candidate]", "The house is red.")
    tab.click("button.go")
    tab.wait(f"({CARD}).startsWith('no pass')")
    assert "wrong_script" in tab.js(CARD) and "0% of the letters are Korean" in tab.js(CARD)
    body = tab.js("document.querySelector('.curl').textContent")
    assert '"task":"translation_filter"' in body


def test_a_task_of_the_operator_has_texts_of_its_own_names(tab, judge):
    tab.open(judge)
    tab.fill("input[name=task]", "tone")
    assert tab.js("document.querySelectorAll('textarea').length") == 0
    tab.fill("input[name=variable]", "sentence")
    tab.click("button", "Add a text")
    tab.fill("textarea[name=sentence]", "안녕")
    tab.click("button.go")
    tab.wait("document.querySelector('.card.failed')")
    assert "failed: invalid_input" in tab.js(CARD)
    assert '"task":"tone","sentence":"안녕"' in tab.js(
        "document.querySelector('.curl').textContent"
    )


def test_errors_that_a_judge_finds_stand_in_both_texts(tab, script):
    sample = {"task": "mqm", "src": "one two", "mt": "하나"}
    left_out = {"start": 4, "end": 7, "severity": "MAJOR", "confidence": None, "category": None}
    result = {"ok": True, "score": -5, "error_spans": [], "omissions": [left_out], "cached": False}
    source = script("dom", "marks", "card", "judge")
    card_call = f"verdictCard({json.dumps(sample)}, {json.dumps(result)})"
    contents = "['.score', 'mark'].map((part) => card.querySelector(part).textContent)"
    card = tab.js(f"(() => {{ {source}; const card = {card_call}; return {contents}; }})()")
    assert card == ["-5", "two"]


def test_only_what_was_asked_for_last_is_shown(tab):
    with running_service(FakeEmbedder(8, 16)) as url:
        tab.open(url)
        tab.js(GATE)
        tab.js("gate = () => new Promise((go) => (globalThis.waits ??= []).push(go))")
        tab.fill("textarea[name=first]", "red house")
        tab.fill("textarea[name=second]", "red roof")
        tab.click("button.go")
        tab.wait("globalThis.waits?.length === 1")
        assert tab.js("document.querySelector('.try').innerText").endswith(
            "Waiting for the service …"
        )
        tab.fill("textarea[name=second]", "red house")
        tab.click("button.go")
        tab.wait("waits.length === 2")
        tab.js("waits[1]()")
        tab.wait("document.querySelector('.card')")
        tab.js("waits[0]()")
        tab.wait("answered === 2")
        # The first answer has been read by now.
        tab.js("fetch('/v1/info').then((answer) => answer.json())")
        assert tab.js("[...document.querySelectorAll('.score')].map((s) => s.textContent)") == ["1"]
        assert "Waiting" not in tab.js("document.querySelector('.try').innerText")


def test_the_similarity_of_two_texts(tab):
    with running_service(FakeEmbedder(8, 16)) as url:
        tab.open(url)
        tab.fill("textarea[name=first]", "red house")
        tab.click("button.go")
        tab.wait(FAULT)
        assert "second text is empty" in tab.js(FAULT)
        tab.fill("textarea[name=second]", "집 red")
        tab.click("button.go")
        tab.wait("document.querySelector('.card')")
        answer = httpx.post(f"{url}/v1/embeddings", json={"input": ["red house", "집 red"]}).json()
        a, b = (row["embedding"] for row in answer["data"])
        dot = sum(x * y for x, y in zip(a, b, strict=True))
        assert float(tab.js("document.querySelector('.score').textContent")) == pytest.approx(
            dot, abs=1e-4
        )
        tab.fill("textarea[name=first]", "w " * 100)
        tab.click("button.go")
        tab.wait(FAULT)
        assert "overlong" in tab.js(FAULT)


@pytest.fixture(scope="module")
def index(tmp_path_factory):
    home = tmp_path_factory.mktemp("retriever")
    (home / "sources").mkdir()
    draw_pdf(home / "sources/trade & 인구.pdf", [["Exports of rice"], ["Imports of steel"]])
    ingest([home / "sources"], home / "index", [Bm25Builder("bigrams")], workers=1)
    return home / "index"


def test_pages_are_found_shown_and_cut(tab, index):
    with running_service(RetrieverBackend(index), Secrets(api_keys=SecretStr("secret"))) as url:
        headers = {"Authorization": "Bearer secret"}
        tab.open(url)
        tab.wait("!document.querySelector('form.key').hidden")
        tab.ask("Input.insertText", text="secret")
        tab.press("Enter")
        tab.wait("document.getElementById('model').textContent.includes('2 pages')")
        tab.fill("input[name=query]", "rice")
        tab.click("button.go")
        # With the key, which <img src> does not send.
        tab.wait("document.querySelector('.hit img')")
        assert "trade & 인구, page 1" in tab.js("document.querySelector('.hit').textContent")
        tab.js("for (let n = 0; n < 2; n++) document.querySelector('.hit').click()")
        tab.wait("document.querySelector('.stage img')")
        assert tab.js("document.querySelectorAll('.stage').length") == 1
        x, y, w, h = tab.js(
            "(() => { const s = document.querySelector('.stage img'); s.scrollIntoView();"
            "const r = s.getBoundingClientRect(); return [r.x, r.y, r.width, r.height]; })()"
        )
        tab.drag((x + w / 2, y + h / 2), (x + w / 4, y + h / 4), (x + w / 10, y + h / 10))
        tab.wait("document.querySelector('.part img')")
        numbers = "[...document.querySelectorAll('.crop input')].map((i) => +i.value)"
        hit = httpx.post(f"{url}/v1/search", json={"queries": [{"query": "rice"}]}, headers=headers)
        hit = hit.json()["results"][0]["hits"][0]
        wide, high = hit["width"], hit["height"]
        expected_crop = [wide / 10, high / 10, wide / 2, high / 2]
        assert tab.js(numbers) == pytest.approx(expected_crop, abs=3)
        part = "document.querySelector('.part img')"
        size = f"[{part}.naturalWidth, {part}.naturalHeight]"
        assert tab.js(size) == pytest.approx([0.4 * wide, 0.4 * high], abs=6)
        for name, value in {"x1": 0, "y1": 1, "x2": 33, "y2": 21}.items():
            tab.fill(f".crop input[name={name}]", str(value))
        tab.click(".crop button")
        tab.wait(f"({size}).join() === '33,20'")
        path = tab.js("document.querySelector('.curl').textContent").split("'")[1]
        cut = Image.open(io.BytesIO(httpx.get(path, headers=headers).content))
        assert cut.size == (33, 20)
        tab.fill("input[name=query]", "없는 말")
        tab.click("button.go")
        tab.wait("document.querySelector('.hits [role=status]')?.innerText === 'Nothing found.'")
        assert tab.js("document.querySelector('.stage')") is None
