"""Check the page's messages if the service refuses, is full, or is down."""

from __future__ import annotations

import threading

import httpx
import pytest
from pydantic import SecretStr

from scorekit.server.app import create_app
from scorekit.server.fake import FakeBackend
from scorekit.server.run import service_config
from scorekit.server.settings import Secrets, ServiceSettings
from testing.servers import Held, free_port, running_app, running_service, wait_ready, wait_until

FAULTS = (
    "[...document.querySelectorAll('.fault:not([hidden])')].map((f) => f.innerText).join('\\n')"
)
#: A second passes when a test allows it.
CLOCK = "globalThis.ticks = []; globalThis.setInterval = (tick) => ticks.push(tick);"
SECOND = "ticks.at(-1)()"


def send(page, mt: str = "mt") -> None:
    page.fill("textarea[name=src]", "src")
    page.fill("textarea[name=mt]", mt)
    page.click("button.go")


def test_it_asks_for_a_key_and_keeps_it_to_itself(tab):
    with running_service(FakeBackend("xcomet"), Secrets(api_keys=SecretStr("right-one"))) as url:
        tab.open(url)
        tab.wait("!document.querySelector('form.key').hidden")
        assert tab.js("document.activeElement.name") == "key"
        for selector in ("#model", "dl"):
            assert tab.js(f"document.querySelector('{selector}').textContent") == ""
        for wrong, right in ((True, False), (False, True)):
            tab.ask("Input.insertText", text="right-one" if right else "wrong")
            tab.press("Enter")
            if wrong:
                tab.wait(
                    f"({FAULTS}).includes('401') && !document.querySelector('form.key').hidden"
                )
        tab.wait("document.getElementById('model').textContent === 'fake-xcomet'")
        assert tab.js("document.querySelector('form.key').hidden") and tab.js(FAULTS) == ""
        send(tab)
        tab.wait("document.querySelector('.card .score')")
        assert "right-one" not in tab.js("document.documentElement.outerHTML")
        assert '-H "Authorization: Bearer $SCOREKIT_API_KEY"' in tab.js(
            "document.querySelector('.curl').textContent"
        )
        assert "os.environ['SCOREKIT_API_KEY']" in tab.js(
            "document.querySelector('.python').textContent"
        )
        assert "right-one" not in tab.js(
            "location.href + document.cookie + JSON.stringify(localStorage)"
        )
        tab.open("about:blank").open(url)  # the same tab still has it
        tab.wait("document.getElementById('model').textContent === 'fake-xcomet'")


def test_rows_go_on_with_another_key(tab):
    secrets = Secrets(api_keys=SecretStr("first,second"))
    with running_service(FakeBackend("xcomet"), secrets) as url:
        tab.open(url)
        tab.wait("!document.querySelector('form.key').hidden")
        tab.ask("Input.insertText", text="first")
        tab.press("Enter")
        tab.wait("document.getElementById('model').textContent")
        refusal = '{"error": {"message": "no more"}}'
        tab.js(  # from the second request on, the first key is invalid
            "(() => { const real = fetch; let n = 0; fetch = (url, request) => /score$/.test(url)"
            " && ++n > 1 && /first/.test(request.headers.Authorization)"
            f" ? new Response('{refusal}', {{status: 401}}) : real(url, request); }})()"
        )
        tab.click("input[value='1']")
        tab.fill("textarea[name=rows]", "src\tmt\n" + "\n".join(f"s\tm{k}" for k in range(150)))
        tab.click("button.go")
        tab.wait(f"({FAULTS}).includes('(401): no more')")
        assert tab.js("document.querySelectorAll('.card .score').length") == 100
        assert not tab.js("document.querySelector('form.key').hidden")
        tab.ask("Input.insertText", text="second")
        tab.press("Enter")
        tab.click(".results .fault button", "Try again")
        tab.wait("document.querySelectorAll('.card .score').length === 150")


def test_what_the_service_is_is_learnt_before_the_first_score(tab):
    with running_service(FakeBackend("metricx")) as url:
        refused = "async () => new Response('{}', {status: 503})"
        source = f"globalThis.kept = fetch; globalThis.fetch = {refused}"
        tab.ask("Page.addScriptToEvaluateOnNewDocument", source=source)
        tab.open(url)
        tab.wait(f"({FAULTS}).includes('503')")
        tab.js("globalThis.fetch = kept")  # the service runs by now; no button is pressed
        tab.click("input[value='1']")
        tab.fill("textarea[name=rows]", "src\tmt\na\tb\nc\td\ne\tf")
        tab.click("button.go")
        tab.wait("document.querySelectorAll('.card .score').length === 3")
        assert tab.js("document.getElementById('model').textContent") == "fake-metricx"
        assert tab.js(FAULTS) == ""
        tab.fill("select[name=order]", "best")
        scores = tab.js("[...document.querySelectorAll('.card .score')].map((s) => +s.textContent)")
        assert scores == sorted(scores) and scores[0] < scores[-1]  # for MetricX lower is better


def test_what_the_service_does_not_take_is_said_in_a_line(page):
    send(page, "\ud800")
    page.wait(f"({FAULTS}).includes('The service does not take this (422): ')")
    assert not page.js("Boolean(document.querySelector('.fault:not([hidden]) button'))")
    assert page.js("document.querySelector('.card').textContent").startswith("not scored yet")


def test_too_much_is_said_to_be_too_much(tab):
    with running_service(FakeBackend("xcomet"), max_body_bytes=1024) as url:
        tab.open(url)
        tab.wait("document.getElementById('model').textContent")
        send(tab, "x" * 2000)
        tab.wait(f"({FAULTS}).includes('Too large for this service (413): ')")
        tab.click("input[value='1']")  # rows of 300 bytes are sent in parts that fit
        tab.fill(
            "textarea[name=rows]", "src\tmt\n" + "\n".join(f"{k}\t{'y' * 300}" for k in range(7))
        )
        tab.click("button.go")
        tab.wait("document.querySelectorAll('.card .score').length === 7")
        tab.fill("textarea[name=rows]", f"src\tmt\na\tb\nc\t{'y' * 600}\n\nd\t{'y' * 2000}")
        tab.click("button.go")
        tab.wait(f"({FAULTS}).includes('Row 3: Too large for this service (413): ')")
        assert tab.js("document.querySelectorAll('.card .score').length") == 2


def test_a_full_service_is_asked_again_when_it_says(tab):
    backend = Held("xcomet")
    with running_service(backend, max_queue_items=1) as url:
        tab.ask("Page.addScriptToEvaluateOnNewDocument", source=CLOCK)
        tab.open(url)
        tab.wait("document.getElementById('model').textContent")
        backend.hold()
        waiting = threading.Thread(target=post, args=(url,))
        waiting.start()
        wait_until(backend.entered.is_set)
        send(tab)
        tab.wait(f"/full now \\(429\\): .* in 1 s/s.test({FAULTS})")
        assert tab.js("document.querySelector('.results .fault button').disabled")
        backend.go.set()
        waiting.join()
        tab.js(SECOND)
        assert not tab.js("document.querySelector('.results .fault button').disabled")
        assert " in " not in tab.js("document.querySelector('.results .fault .left').textContent")
        tab.click(".results .fault button")
        tab.wait("document.querySelector('.card .score')")
        assert tab.js(FAULTS) == ""


def post(url: str) -> None:
    sample = {"src": "another's", "mt": "another's"}
    httpx.post(f"{url}/v1/score", json={"samples": [sample]}).raise_for_status()


def test_a_service_that_is_gone_is_said_to_be_gone(tab):
    port = free_port()
    settings = ServiceSettings(cache="memory", port=port)

    def app():
        service_app = create_app(FakeBackend("xcomet"), settings)
        return running_app(service_app, service_config(service_app, settings), port)

    with app() as url:
        wait_ready(url)
        tab.open(url)
        tab.wait("document.getElementById('model').textContent")
    send(tab)
    tab.wait(f"({FAULTS}).includes('No answer from {url}/: the service is down')")
    assert tab.js("document.querySelector('.card').textContent").startswith("not scored yet")
    with app() as url:
        wait_ready(url)
        tab.click(".results .fault button", "Try again")
        tab.wait("document.querySelector('.card .score')")


def test_a_service_that_loads_is_waited_for(tab):
    class Loading(Held):
        def load(self):
            assert self.go.wait(180)
            return super().load()

    backend, settings = Loading("xcomet"), ServiceSettings(cache="memory")
    backend.hold()
    app = create_app(backend, settings)
    with running_app(app, service_config(app, settings), loaded=False) as url:
        tab.ask("Page.addScriptToEvaluateOnNewDocument", source=CLOCK)
        tab.open(url)
        tab.wait(
            f"({FAULTS}).includes('The service takes no work now (503): the model is loading')"
        )
        backend.go.set()
        wait_ready(url)
        for left in (4, 3, 2, 1, 0):
            assert tab.js("document.querySelector('.fault:not([hidden]) button').disabled")
            tab.js(SECOND)
            assert (f"in {left} s" in tab.js(FAULTS)) == (left > 0)
        tab.click(".fault:not([hidden]) button")
        tab.wait("document.getElementById('model').textContent === 'fake-xcomet'")


@pytest.mark.parametrize("body", ["<html>502</html>", '{"results": []}', "[]"])
def test_an_answer_of_another_is_no_score(page, body):
    page.js(f"globalThis.fetch = async () => new Response({body!r})")
    send(page)
    page.wait(f"({FAULTS})")
    assert page.js("document.querySelector('.card .score')") is None
    assert "answer" in page.js(FAULTS)
