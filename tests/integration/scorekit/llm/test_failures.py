"""Check errors between the client and an LLM server, and their messages."""

from __future__ import annotations

import asyncio
import contextlib
import threading

import pytest
from fastapi import FastAPI
from fastapi.responses import RedirectResponse
from pydantic import SecretStr

from scorekit.errors import UserError
from scorekit.llm import Choice, LLMClient, LLMError, Sampling, parse_json
from scorekit.llm.limits import read_timeout_s
from scorekit.llm.wire import typed
from testing.openai_server import FakeOpenAI
from testing.servers import PATIENCE_S, free_port, running_app
from tests.kits.llm import MESSAGES, SAMPLED, VERDICT, ask, client, until


@pytest.mark.parametrize(
    ("failure", "type"),
    [
        (408, "server_error"),
        (409, "server_error"),
        (424, "server_error"),
        (429, "overloaded"),
        (500, "server_error"),
        (503, "unreachable"),
        ("close", "unreachable"),
        ("not_json", "malformed"),
        ("no_choices", "malformed"),
    ],
)
def test_what_may_pass_is_tried_again_under_the_same_id(url, fake, failure, type):
    fake.fail(failure, times=2)
    llm, [choice] = ask(url, fake, max_attempts=3)
    assert choice.text and llm.counts.retries == 2
    assert [r.id for r in fake.requests] == ["r"] * 3
    assert [r.headers["x-stainless-retry-count"] for r in fake.requests] == ["0", "1", "2"]
    fake.forget()
    fake.fail(failure, times=None)
    llm, error = ask(url, fake, max_attempts=3)
    assert len(fake.requests) == 3  # attempts of the SDK do not multiply ours
    assert (error.type, error.retryable, error.request_id) == (type, True, "r")
    assert (llm.counts.requests, llm.counts.retries, llm.counts.failures) == (3, 2, 1)


@pytest.mark.parametrize("status", [400, 405, 413, 422])
def test_another_4xx_is_not_tried_again(url, fake, status):
    fake.fail(status, message="no such thing")
    _, error = ask(url, fake)
    assert (error.type, error.retryable, len(fake.requests)) == ("refused", False, 1)
    assert "no such thing" in error.message


@pytest.mark.parametrize("reason", ["abort", "error", "Abort", None, ""])
def test_a_choice_that_the_server_gave_up_is_not_taken_for_a_text(url, fake, reason):
    fake.finish_reason = reason
    _, error = ask(url, fake, max_attempts=2)
    assert error.type == "server_error" and len(fake.requests) == 2


def test_a_server_that_hangs_is_a_time_out(url, fake):
    fake.hang = True
    llm, error = ask(url, fake, Sampling(max_tokens=1), request_timeout_s=0.2, max_attempts=2)
    assert (error.type, llm.counts.requests) == ("timeout", 2)


def test_an_answer_that_drips_without_end_is_a_time_out():
    over = threading.Event()  # uvicorn waits for the app, which does not notice that nobody reads

    async def app(scope, receive, send):
        if scope["type"] == "http":
            headers = [(b"content-type", b"application/json")]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            while not over.is_set():
                await send({"type": "http.response.body", "body": b" ", "more_body": True})
                await asyncio.sleep(0.01)

    brief = {"request_timeout_s": 0.5, "connect_timeout_s": 0.5, "max_attempts": 1}

    async def work(url):
        async with LLMClient(url, "m", **brief) as llm:
            async with asyncio.timeout(PATIENCE_S):
                await llm.chat(MESSAGES, Sampling(max_tokens=1), request_id="r")

    with running_app(app) as url:
        try:
            with pytest.raises(LLMError) as error_info:
                asyncio.run(work(url))
        finally:
            over.set()
    assert (error_info.value.type, error_info.value.retryable) == ("timeout", True)


def test_the_time_out_grows_with_the_work_from_a_floor(url, fake):
    assert read_timeout_s(120, max_tokens=512, sequences_in_flight=1) == 120
    assert read_timeout_s(120, max_tokens=512, sequences_in_flight=1024) == 384
    assert read_timeout_s(120, max_tokens=8192, sequences_in_flight=256) > 2400
    ask(url, fake, Sampling(max_tokens=100), n=32, request_timeout_s=1)
    assert float(fake.requests[0].headers["x-stainless-read-timeout"]) == 16.875


def test_retry_after_is_honoured(url, fake):
    fake.fail(429, headers={"retry-after": "1"})
    ask(url, fake)
    first, second = fake.requests
    assert second.time - first.time >= 1


def test_parts_have_ids_of_their_own(url, fake):
    ask(url, fake, n=33)
    assert sorted(r.id for r in fake.requests) == ["r.0-31", "r.32"]


@contextlib.asynccontextmanager
async def door(port, url):
    """Open a TCP port that leads to the server within the block, and refuses before and after."""
    upstream = int(url.split(":")[2].removesuffix("/v1"))
    writers = []

    async def pump(reader, writer):
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(65536):
                writer.write(data)
        writer.close()

    async def through(reader, writer):
        upstream_reader, back = await asyncio.open_connection("127.0.0.1", upstream)
        writers.extend((writer, back))
        await asyncio.gather(pump(reader, back), pump(upstream_reader, writer))

    server = await asyncio.start_server(through, "127.0.0.1", port)
    try:
        yield
    finally:
        server.close()
        for writer in writers:
            writer.close()


def test_a_server_that_comes_back_is_waited_for_beyond_the_attempts(url, fake):
    port = free_port()

    async def work():
        settings = {"max_attempts": 1, "backoff_s": (0.02,), "wait_for_server_s": 60}
        async with LLMClient(f"http://127.0.0.1:{port}/v1", "teacher", **settings) as llm:
            checked = asyncio.create_task(llm.check())
            task = asyncio.create_task(llm.chat(MESSAGES, SAMPLED, n=3, request_id="r"))
            await until(lambda: llm.counts.requests > 3)
            assert not checked.done() and not task.done() and not fake.requests
            async with door(port, url):
                await checked
                assert len(await task) == 3
                fake.hang = True
                task = asyncio.create_task(llm.chat(MESSAGES, SAMPLED, request_id="cut"))
                await until(lambda: fake.in_flight)
            before = llm.counts.requests
            await until(lambda: llm.counts.requests > before + 3)
            fake.hang = False
            async with door(port, url):
                assert (await task)[0].text

    asyncio.run(asyncio.wait_for(work(), 40))


def test_a_server_that_stays_away_is_given_up(fake):
    url = f"http://127.0.0.1:{free_port()}/v1"
    llm, error = ask(url, fake, max_attempts=2)
    assert error.type == "unreachable" and llm.counts.requests == 2
    llm, error = ask(url, fake, max_attempts=2, backoff_s=(0.02,), wait_for_server_s=1.0)
    assert error.type == "unreachable" and llm.counts.requests > 2


def test_another_failure_is_not_waited_for(url, fake):
    fake.fail(500, times=None)
    _, error = ask(url, fake, max_attempts=2, wait_for_server_s=60)
    assert error.type == "server_error" and len(fake.requests) == 2


def _check(url, **settings):
    async def work():
        async with LLMClient(url, settings.pop("model", "teacher"), **settings) as llm:
            await llm.check()

    return asyncio.run(work())


def test_check_passes_on_a_server_that_fits(url, fake):
    fake.api_key = "sesame"
    _check(url, api_key=SecretStr("sesame"))


def test_check_says_what_to_do(url, fake):
    with pytest.raises(UserError, match=r"--served-model-name.*'teacher'"):
        _check(url, model="Qwen/Qwen3")
    with pytest.raises(UserError, match="/v1"):
        _check(url.removesuffix("/v1"))
    with pytest.raises(UserError, match="Start the server"):
        _check(f"http://127.0.0.1:{free_port()}/v1")
    fake.api_key = "sesame"
    with pytest.raises(UserError, match=r"got none.*--api-key.*VLLM_API_KEY"):
        _check(url)
    with pytest.raises(UserError, match=r"refused the API key.*--api-key.*VLLM_API_KEY"):
        _check(url, api_key=SecretStr("wrong"))
    with pytest.raises(UserError, match="http://host"):
        _check("localhost:8000/v1")


def test_a_request_tells_the_operator_what_to_mend(url, fake):
    async def message_of(n=1, **settings):
        settings = {"model": "teacher"} | settings
        async with LLMClient(url, **settings) as llm:
            with pytest.raises(UserError) as error_info:
                await llm.chat(MESSAGES, SAMPLED, n=n, request_id="r")
            assert llm.counts.failures == 1
            assert "\n" not in str(error_info.value)
            return str(error_info.value)

    assert "--served-model-name" in asyncio.run(message_of(model="other"))
    fake.no_template = True
    assert "--chat-template" in asyncio.run(message_of())
    fake.well()
    fake.fail(400, message="System role not supported")
    assert "--chat-template" in asyncio.run(message_of())
    fake.api_key = "sesame"
    assert "VLLM_API_KEY" in asyncio.run(message_of())
    fake.api_key, fake.no_template = None, True
    # Last: its other part may still arrive.
    assert "--chat-template" in asyncio.run(message_of(n=40))


def test_a_prompt_that_is_too_long_is_the_text_s_fault(url, fake):
    fake.context_length = 66
    llm, error = ask(url, fake, n=3)
    assert (error.type, error.retryable, llm.counts.requests) == ("overlong", False, 1)


def test_a_text_that_is_not_unicode_fails_alone(url, fake):
    async def work():
        async with client(url, fake) as llm:
            with pytest.raises(LLMError, match="Unicode"):
                bad = [{"role": "user", "content": "\ud800"}]
                await llm.chat(bad, SAMPLED, request_id="r")

    asyncio.run(work())
    assert not fake.requests


def test_no_key_stands_in_an_error_or_a_log(url, fake, caplog):
    caplog.set_level("DEBUG")
    fake.fail(400, message="bad request by Bearer sesame-123")
    llm, error = ask(url, fake, api_key=SecretStr("sesame-123"))
    seen = f"{error!r} {error} {vars(error)} {vars(llm)}"
    assert "sesame-123" not in seen and "***" in seen
    secret_url = url.replace("127.0.0.1", "me:hidden@127.0.0.1")
    fake.fail(500)
    _, error = ask(secret_url, fake, max_attempts=1)
    assert error.type == "server_error" and "hidden" not in str(error)
    assert fake.requests[-1].headers["authorization"] == "Basic bWU6aGlkZGVu"  # me:hidden
    assert "sesame-123" not in caplog.text and "hidden" not in caplog.text


def test_failures_are_logged_by_type_status_and_id_without_the_server_s_words(url, fake, caplog):
    caplog.set_level("INFO", logger="scorekit.llm")
    fake.fail(500, times=None, message="a text of the corpus")
    ask(url, fake, max_attempts=2)
    first, last = (record.getMessage() for record in caplog.records)
    assert first.startswith("request r: server_error, HTTP 500; attempt 1, again in")
    assert last == "request r: server_error, HTTP 500; attempt 2 was the last"
    assert [record.levelname for record in caplog.records] == ["INFO", "WARNING"]
    assert "corpus" not in caplog.text


def test_the_user_s_own_openai_key_is_not_sent(url, fake, monkeypatch):
    for name in ("OPENAI_API_KEY", "OPENAI_ORG_ID", "OPENAI_PROJECT_ID"):
        monkeypatch.setenv(name, "mine")
    ask(url, fake)
    assert "mine" not in str(fake.requests[0].headers)


def test_structured_output_is_asked_for_and_checked(url, fake):
    _, choices = ask(url, fake, n=8, json_schema=VERDICT)
    sent = fake.requests[0].body["response_format"]
    assert sent["type"] == "json_schema" and sent["json_schema"]["schema"] == typed(VERDICT)
    verdicts = [parse_json(choice, VERDICT) for choice in choices]
    assert {verdict["pass"] for verdict in verdicts} == {True, False}


def test_a_cut_json_is_an_outcome_of_its_own(url, fake):
    fake.cut = True
    _, [choice] = ask(url, fake, json_schema=VERDICT)
    with pytest.raises(LLMError) as error_info:
        parse_json(choice, VERDICT)
    assert error_info.value.type == "length"


def test_a_json_that_a_content_filter_kept_back_is_refused_for_good():
    with pytest.raises(LLMError) as error_info:
        parse_json(Choice(0, "", "content_filter", 0), VERDICT)
    assert (error_info.value.type, error_info.value.retryable) == ("refused", False)


@pytest.mark.parametrize("reason", ["tool_calls", "function_call", "repetition", "incomplete"])
def test_a_whole_json_that_ended_in_another_way_is_no_verdict(reason):
    complete_json = '{"pass": true}'
    schema = {"type": "object", "properties": {"pass": {"type": "boolean"}}}
    assert parse_json(Choice(0, complete_json, "stop", 1), schema) == {"pass": True}
    with pytest.raises(LLMError, match=f"finish_reason '{reason}'") as error_info:
        parse_json(Choice(0, complete_json, reason, 1), schema)
    assert (error_info.value.type, error_info.value.retryable) == ("malformed", True)


@pytest.mark.parametrize(
    "text",
    [
        "pass",
        '{"pass": true',
        "[1]",
        '{"pass": NaN}',
        '{"pass": "yes", "reason_code": "ok", "notes": ""}',
        '{"pass": true, "reason_code": "other", "notes": ""}',
        '{"pass": true, "reason_code": "ok"}',
        '{"pass": false, "pass": true, "reason_code": "ok", "notes": ""}',
    ],
)
def test_what_does_not_fit_the_schema_is_malformed(text):
    with pytest.raises(LLMError) as error_info:
        parse_json(Choice(0, text, "stop", 1), VERDICT)
    assert (error_info.value.type, error_info.value.retryable) == ("malformed", True)


def test_a_redirect_is_not_followed():
    other, app = FakeOpenAI("m"), FastAPI()

    @app.api_route("/v1/{path:path}", methods=["GET", "POST"])
    async def elsewhere(path: str) -> RedirectResponse:
        return RedirectResponse(f"{other_url}/{path}", 307)

    async def try_it(url):
        async with LLMClient(f"{url}/v1", "m", api_key=SecretStr("hidden")) as client:
            with pytest.raises(UserError, match="redirects"):
                await client.check()
            with pytest.raises(UserError, match="redirects"):
                await client.chat(MESSAGES, Sampling(8), request_id="r")

    with other.running() as other_url, running_app(app) as url:
        asyncio.run(try_it(url))
    assert not other.requests
