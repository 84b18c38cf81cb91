"""The LLM client against a fake OpenAI server: budgets, attempts, candidates, mistakes."""

from __future__ import annotations

import asyncio
import contextlib

import pytest
from pydantic import SecretStr

from scorekit.errors import UserError
from scorekit.llm import Choice, LLMClient, LLMError, Sampling, parse_json
from scorekit.llm_errors import _retry_after
from scorekit.llm_pacing import Patience, read_timeout_s
from tests.openai_server import FakeOpenAI
from tests.servers import free_port

MESSAGES = [
    {"role": "system", "content": "You are a professional translator."},
    {"role": "user", "content": "Translate: 안녕하세요"},
]
SAMPLED = Sampling(max_tokens=64, seed=1000)
GREEDY = Sampling(max_tokens=64, temperature=0.0, seed=1000)
AT_ONCE = (0.0,)
VERDICT = {
    "type": "object",
    "properties": {
        "pass": {"type": "boolean"},
        "reason_code": {"enum": ["ok", "language", "meaning"]},
        "notes": {"type": "string", "maxLength": 40},
    },
    "required": ["pass", "reason_code", "notes"],
    "additionalProperties": False,
}


@pytest.fixture
def fake():
    return FakeOpenAI()


@pytest.fixture
def url(fake):
    with fake.running() as base_url:
        yield base_url


def client(url, fake, **settings):
    settings.setdefault("backoff_s", AT_ONCE)
    return LLMClient(url, fake.model, **settings)


def ask(url, fake, sampling=SAMPLED, n=1, json_schema=None, **settings):
    """The choices and the client that asked for them, both after the end."""

    async def work():
        async with client(url, fake, **settings) as llm:
            try:
                return llm, await llm.chat(
                    MESSAGES, sampling, n=n, request_id="r", json_schema=json_schema
                )
            except LLMError as error:
                return llm, error

    return asyncio.run(work())


async def until(condition):
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.005)


# -- what is sent, what comes back ----------------------------------------------------------------


def test_every_sampling_field_is_sent_even_when_it_is_the_default(url, fake):
    _, [choice] = ask(url, fake)
    body = fake.requests[0].body
    assert body == {
        "model": "teacher",
        "messages": MESSAGES,
        "n": 1,
        "seed": 1000,
        "max_tokens": 64,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "stop": None,
    }
    assert choice == Choice(
        0, fake.respond(body, 1000), "stop", len(fake.respond(body, 1000).split())
    )


def test_a_text_cut_by_max_tokens_says_so(url, fake):
    _, [choice] = ask(url, fake, Sampling(max_tokens=3))
    assert choice.finish_reason == "length" and len(choice.text.split()) == 3


@pytest.mark.parametrize("text", [None, ""])
def test_a_choice_without_content_is_an_empty_text(url, fake, text):
    fake.respond = lambda body, seed: text
    fake.finish_reason = None
    _, [choice] = ask(url, fake)
    assert (choice.text, choice.finish_reason) == ("", "unknown")


def test_requests_and_tokens_are_counted(url, fake):
    fake.fail(500, times=2)
    llm, choices = ask(url, fake, n=40)
    counts = llm.counts
    assert (counts.requests, counts.retries, counts.failures, counts.choices) == (4, 2, 0, 40)
    assert counts.completion_tokens == sum(len(choice.text.split()) for choice in choices)
    assert counts.prompt_tokens == 2 * 7


# -- candidates -----------------------------------------------------------------------------------


def test_both_strategies_name_the_same_candidates(url, fake):
    _, together = ask(url, fake, n=70, strategy="n_parameter")
    assert sorted(r.body["n"] for r in fake.requests) == [6, 32, 32]
    assert sorted(r.body["seed"] for r in fake.requests) == [1000, 1032, 1064]
    fake.forget()
    _, single = ask(url, fake, n=70, strategy="per_call")
    assert [r.body["n"] for r in fake.requests] == [1] * 70
    assert sorted(r.body["seed"] for r in fake.requests) == list(range(1000, 1070))
    assert [c.index for c in together] == list(range(70))
    assert [(c.index, c.text) for c in together] == [(c.index, c.text) for c in single]
    assert len({c.text for c in single}) == 70


def test_a_server_that_refuses_n_is_asked_one_by_one_and_that_is_remembered(url, fake):
    _, expected = ask(url, fake, n=5)
    fake.forget()
    fake.refuse_n = True

    async def work():
        async with client(url, fake) as llm:
            first = await llm.chat(MESSAGES, SAMPLED, n=5, request_id="a")
            asked = len(fake.requests)
            second = await llm.chat(MESSAGES, SAMPLED, n=5, request_id="b")
            assert llm.counts.failures == llm.counts.retries == 0
            return first, second, asked

    first, second, asked = asyncio.run(work())
    assert asked == 6 and len(fake.requests) == 11  # one refused request, never again
    assert [c.text for c in first] == [c.text for c in second] == [c.text for c in expected]


@pytest.mark.parametrize("numbered", [True, False])
def test_of_a_short_answer_only_the_missing_choices_are_asked_again(url, fake, numbered):
    _, expected = ask(url, fake, n=5)
    fake.forget()
    fake.most_choices, fake.numbered = 2, numbered
    _, choices = ask(url, fake, n=5)
    assert [(r.body["n"], r.body["seed"]) for r in fake.requests[:2]] == [(5, 1000), (1, 1002)]
    assert sorted(r.body["seed"] for r in fake.requests[2:]) == [1003, 1004]
    assert [c.text for c in choices] == [c.text for c in expected]


def test_n_parameter_does_not_fall_back(url, fake):
    fake.most_choices = 2
    _, error = ask(url, fake, n=5, strategy="n_parameter")
    assert error.type == "incomplete"
    fake.refuse_n = True
    _, error = ask(url, fake, n=5, strategy="n_parameter")
    assert error.type == "refused" and len(fake.requests) == 2


def test_a_request_that_is_refused_for_itself_does_not_end_the_use_of_n(url, fake):
    async def work():
        async with client(url, fake) as llm:
            fake.fail(400, times=2)
            with pytest.raises(LLMError) as caught:
                await llm.chat(MESSAGES, SAMPLED, n=5, request_id="bad")
            assert (caught.value.type, caught.value.retryable) == ("refused", False)
            await llm.chat(MESSAGES, SAMPLED, n=5, request_id="good")

    asyncio.run(work())
    assert [r.body["n"] for r in fake.requests] == [5, 1, 5]


def test_several_greedy_choices_are_refused_before_anything_is_sent(url, fake):
    with pytest.raises(ValueError):
        ask(url, fake, GREEDY, n=2)
    assert not fake.requests
    _, [choice] = ask(url, fake, GREEDY)
    assert choice.text == ask(url, fake, Sampling(64, 0.0, seed=5))[1][0].text


def test_without_a_seed_none_is_sent(url, fake):
    ask(url, fake, Sampling(max_tokens=64), n=40)
    assert [r.body["seed"] for r in fake.requests] == [None, None]


# -- budgets --------------------------------------------------------------------------------------


def _many(url, fake, requests, n, expected, **settings):
    """Hold the requests at the server, `expected` at once; then let all of them go."""

    async def work():
        fake.hang = True
        async with client(url, fake, **settings) as llm:
            async with asyncio.TaskGroup() as group:
                for i in range(requests):
                    group.create_task(llm.chat(MESSAGES, SAMPLED, n=n, request_id=f"r{i}"))
                await until(lambda: fake.in_flight == expected)
                await asyncio.sleep(0.1)  # time for one too many
                fake.hang = False

    asyncio.run(work())


def test_sequences_in_flight_never_exceed_their_cap(url, fake):
    _many(url, fake, requests=6, n=24, expected=2, max_sequences=50)
    assert (fake.peak_sequences, fake.peak_requests) == (48, 2)
    assert fake.choices_served == 6 * 24


def test_a_request_larger_than_the_cap_is_split(url, fake):
    _many(url, fake, requests=2, n=20, expected=1, max_sequences=8)
    assert fake.peak_sequences == 8
    assert sorted(r.body["n"] for r in fake.requests) == [4, 4, 8, 8, 8, 8]


def test_requests_in_flight_never_exceed_their_cap(url, fake):
    _many(url, fake, requests=12, n=1, expected=5, max_concurrency=5)
    assert fake.peak_requests == 5


def test_cancelled_requests_give_their_place_back(url, fake):
    async def work():
        async with client(url, fake, max_concurrency=2, max_sequences=4) as llm:
            fake.hang = True

            def start(n, name):
                work = llm.chat(MESSAGES, SAMPLED, n=n, request_id=name)
                return asyncio.create_task(work)

            running = [start(2, "a"), start(2, "b")]
            await until(lambda: fake.in_flight == 2)
            waiting = [start(4, "c"), start(1, "d")]
            await asyncio.sleep(0)
            waiting[0].cancel()  # the head of the queue
            running[0].cancel()
            await until(lambda: sorted(r.id for r in fake.requests) == ["a", "b", "d"])
            running[1].cancel()
            fake.hang = False
            assert len(await start(4, "e")) == 4
            await asyncio.wait([*running, *waiting])
            assert llm.counts.failures == 0 and not waiting[1].exception()

    asyncio.run(asyncio.wait_for(work(), 20))


def test_the_rate_limiter_spaces_the_requests(url, fake):
    ask(url, fake, n=8, strategy="per_call", requests_per_minute=600)
    times = [r.time for r in fake.requests]
    assert times[-1] - times[0] > 0.4  # seven gaps of 0.1 s, less what the way may differ


# -- attempts -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("failure", "type"),
    [
        (408, "server_error"),
        (409, "server_error"),
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
    assert len(fake.requests) == 3  # the SDK's own attempts do not multiply ours
    assert (error.type, error.retryable, error.request_id) == (type, True, "r")
    assert (llm.counts.requests, llm.counts.retries, llm.counts.failures) == (3, 2, 1)


@pytest.mark.parametrize("status", [400, 405, 413, 422])
def test_another_4xx_is_not_tried_again(url, fake, status):
    fake.fail(status, message="no such thing")
    _, error = ask(url, fake)
    assert (error.type, error.retryable, len(fake.requests)) == ("refused", False, 1)
    assert "no such thing" in error.message


def test_a_choice_that_the_server_gave_up_is_not_taken_for_a_text(url, fake):
    fake.finish_reason = "abort"
    _, error = ask(url, fake, max_attempts=2)
    assert error.type == "server_error" and len(fake.requests) == 2


def test_a_server_that_hangs_is_a_time_out(url, fake):
    fake.hang = True
    llm, error = ask(url, fake, Sampling(max_tokens=1), request_timeout_s=0.2, max_attempts=2)
    assert (error.type, llm.counts.requests) == ("timeout", 2)


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


def test_retry_after_may_be_a_date_by_the_server_s_clock():
    headers = {
        "date": "Fri, 20 Nov 2026 10:00:00 GMT",
        "retry-after": "Fri, 20 Nov 2026 10:00:30 GMT",
    }
    assert _retry_after(headers) == 30
    assert _retry_after(headers | {"retry-after": "soon"}) is None


def test_pauses_follow_the_schedule_with_jitter_and_never_undercut_retry_after():
    away = LLMError("unreachable", "", retryable=True)
    patience = Patience(9, (1, 2, 4), 0.0)
    pauses = [patience.pause_after(away) for _ in range(9)]
    assert pauses[8] is None
    for pause, step in zip(pauses[:8], [1, 2, 4, 4, 4, 4, 4, 4], strict=True):
        assert 0.75 * step <= pause <= 1.25 * step
    assert len(set(pauses)) == 9
    told = LLMError("overloaded", "", retryable=True, retry_after=30.0)
    assert Patience(2, (1,), 0.0).pause_after(told) >= 30
    assert Patience(2, (1,), 0.0).pause_after(LLMError("refused", "")) is None


def test_parts_have_ids_of_their_own(url, fake):
    ask(url, fake, n=33)
    assert sorted(r.id for r in fake.requests) == ["r.0-31", "r.32"]


# -- a server that goes and comes back ------------------------------------------------------------


@contextlib.asynccontextmanager
async def door(port, url):
    """A TCP port that leads to the server while the block runs; refused before and after."""
    upstream = int(url.split(":")[2].removesuffix("/v1"))
    writers = []

    async def pump(reader, writer):
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(65536):
                writer.write(data)
        writer.close()

    async def through(reader, writer):
        there, back = await asyncio.open_connection("127.0.0.1", upstream)
        writers.extend((writer, back))
        await asyncio.gather(pump(reader, back), pump(there, writer))

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
            asked = asyncio.create_task(llm.chat(MESSAGES, SAMPLED, n=3, request_id="r"))
            await until(lambda: llm.counts.requests > 3)
            assert not checked.done() and not asked.done() and not fake.requests
            async with door(port, url):
                await checked
                assert len(await asked) == 3
                fake.hang = True
                asked = asyncio.create_task(llm.chat(MESSAGES, SAMPLED, request_id="cut"))
                await until(lambda: fake.in_flight)
            before = llm.counts.requests
            await until(lambda: llm.counts.requests > before + 3)
            fake.hang = False
            async with door(port, url):
                assert (await asked)[0].text

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


# -- mistakes of the operator ---------------------------------------------------------------------


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
    with pytest.raises(UserError, match="start it"):
        _check(f"http://127.0.0.1:{free_port()}/v1")
    fake.api_key = "sesame"
    with pytest.raises(UserError, match=r"got none.*--api-key.*VLLM_API_KEY"):
        _check(url)
    with pytest.raises(UserError, match=r"refused the API key.*--api-key.*VLLM_API_KEY"):
        _check(url, api_key=SecretStr("wrong"))
    with pytest.raises(UserError, match="http://host"):
        _check("localhost:8000/v1")


def test_a_request_tells_the_operator_what_to_mend(url, fake):
    async def said(n=1, **settings):
        settings = {"model": "teacher"} | settings
        async with LLMClient(url, **settings) as llm:
            with pytest.raises(UserError) as caught:
                await llm.chat(MESSAGES, SAMPLED, n=n, request_id="r")
            assert llm.counts.failures == 1
            assert "\n" not in str(caught.value)
            return str(caught.value)

    assert "--served-model-name" in asyncio.run(said(model="other"))
    fake.no_template = True
    assert "--chat-template" in asyncio.run(said())
    assert "--chat-template" in asyncio.run(said(n=40))
    fake.well()
    fake.fail(400, message="System role not supported")
    assert "--chat-template" in asyncio.run(said())
    fake.api_key = "sesame"
    assert "VLLM_API_KEY" in asyncio.run(said())


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


def test_the_user_s_own_openai_key_is_not_sent(url, fake, monkeypatch):
    for name in ("OPENAI_API_KEY", "OPENAI_ORG_ID", "OPENAI_PROJECT_ID"):
        monkeypatch.setenv(name, "mine")
    ask(url, fake)
    assert "mine" not in str(fake.requests[0].headers)


# -- structured output ----------------------------------------------------------------------------


def test_structured_output_is_asked_for_and_checked(url, fake):
    _, choices = ask(url, fake, n=8, json_schema=VERDICT)
    sent = fake.requests[0].body["response_format"]
    assert sent["type"] == "json_schema" and sent["json_schema"]["schema"] == VERDICT
    verdicts = [parse_json(choice, VERDICT) for choice in choices]
    assert {verdict["pass"] for verdict in verdicts} == {True, False}


def test_a_cut_json_is_an_outcome_of_its_own(url, fake):
    fake.cut = True
    _, [choice] = ask(url, fake, json_schema=VERDICT)
    with pytest.raises(LLMError) as caught:
        parse_json(choice, VERDICT)
    assert caught.value.type == "length"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "pass",
        '{"pass": true',
        "[1]",
        '{"pass": NaN}',
        '{"pass": "yes", "reason_code": "ok", "notes": ""}',
        '{"pass": true, "reason_code": "other", "notes": ""}',
        '{"pass": true, "reason_code": "ok"}',
    ],
)
def test_what_does_not_fit_the_schema_is_malformed(text):
    with pytest.raises(LLMError) as caught:
        parse_json(Choice(0, text, "stop", 1), VERDICT)
    assert (caught.value.type, caught.value.retryable) == ("malformed", True)
