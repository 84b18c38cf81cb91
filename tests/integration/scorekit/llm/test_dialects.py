"""Test images in messages, and requests to servers that are not vLLM."""

from __future__ import annotations

import asyncio
from base64 import b64decode

import pytest

from scorekit.errors import UserError
from scorekit.llm import Choice, LLMClient, LLMError, Sampling, image_part, text_part
from scorekit.llm.wire import unfinished_reason
from testing.openai_server import FakeOpenAI

PNG = b"\x89PNG\r\n\x1a\n and so on"
MESSAGES = [
    {"role": "system", "content": "Read the picture."},
    {"role": "user", "content": [text_part("What is shown?"), image_part(PNG)]},
]


@pytest.fixture(scope="module")
def served():
    fake = FakeOpenAI("seer")
    with fake.running() as url:
        yield fake, url


def send(served, dialect, sampling=None, **options):
    fake, url = served
    fake.forget()
    fake.well()

    async def work():
        async with LLMClient(url, fake.model, dialect=dialect, backoff_s=(0.0,)) as llm:
            return await llm.chat(
                MESSAGES, sampling or Sampling(max_tokens=64), request_id="r", **options
            )

    return asyncio.run(work())


@pytest.mark.parametrize("dialect", ["vllm", "openai"])
def test_a_picture_goes_out_as_a_data_url_and_comes_whole(served, dialect):
    send(served, dialect)
    (request,) = served[0].requests
    text, image = request.body["messages"][1]["content"]
    head, _, data = image["image_url"]["url"].partition(",")
    assert (text, head) == (text_part("What is shown?"), "data:image/png;base64")
    assert b64decode(data) == PNG


def test_openai_is_sent_nothing_that_it_refuses(served):
    send(served, "openai", Sampling(max_tokens=64, effort="low"))
    (request,) = served[0].requests
    assert request.body.keys() == {
        "model",
        "messages",
        "max_completion_tokens",
        "reasoning_effort",
    }
    with pytest.raises(UserError, match="top_k"):
        send(served, "openai", Sampling(max_tokens=64, top_k=20))


def test_gemini_is_sent_what_openai_is_but_for_the_seed(served):
    sampling = Sampling(max_tokens=64, seed=7, temperature=0.0, effort="low")
    bodies = []
    for dialect in ("gemini", "openai"):
        send(served, dialect, sampling)
        bodies.append(served[0].requests[0].body)
    assert bodies[1].pop("seed") == 7 and bodies[0] == bodies[1]


@pytest.mark.parametrize("listed", ["seer", "models/seer"])
def test_a_model_is_known_as_gemini_lists_it_too(listed):
    fake = FakeOpenAI(listed)

    async def work(url, model):
        async with LLMClient(url, model, dialect="gemini") as llm:
            await llm.check()

    with fake.running() as url:
        asyncio.run(work(url, "seer"))
        with pytest.raises(UserError, match="'eer'"):
            asyncio.run(work(url, "eer"))


def test_the_responses_api_gets_the_same_chat_in_its_words(served):
    (choice,) = send(served, "responses", Sampling(max_tokens=64, temperature=0.0, effort="low"))
    (request,) = served[0].requests
    body = request.body
    assert (body["max_output_tokens"], body["store"], body["temperature"]) == (64, False, 0.0)
    assert body["reasoning"] == {"effort": "low"} and "seed" not in body and "n" not in body
    assert body["input"][0]["content"] == [{"type": "input_text", "text": "Read the picture."}]
    text, image = body["input"][1]["content"]
    assert text == {"type": "input_text", "text": "What is shown?"}
    assert image["type"] == "input_image"
    assert b64decode(image["image_url"].partition(",")[2]) == PNG
    assert choice.finish_reason == "stop" and choice.text
    assert choice.completion_tokens == len(choice.text.split()) and choice.prompt_tokens


def test_a_response_that_was_cut_says_so(served):
    (choice,) = send(served, "responses", Sampling(max_tokens=2))
    assert choice.finish_reason == "length" and len(choice.text.split()) == 2


def test_several_responses_are_asked_for_one_by_one(served):
    choices = send(served, "responses", n=3)
    assert [c.index for c in choices] == [0, 1, 2] and len(served[0].requests) == 3


def answered(body: bytes) -> Choice | LLMError:
    from scorekit.llm.dialects import DIALECTS

    try:
        choices, _ = DIALECTS["responses"].read(body, range(1))
    except LLMError as error:
        return error
    return choices[0]


def test_answers_that_are_no_text_are_told_apart():
    for garbage in (b"", b"{}", b'{"choices": []}', b"<html>"):
        failed = answered(garbage)
        assert isinstance(failed, LLMError) and (failed.type, failed.retryable) == (
            "malformed",
            True,
        )
    failed = answered(b'{"status": "failed", "output": []}')
    assert isinstance(failed, LLMError) and failed.type == "server_error"
    thought = answered(
        b'{"status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"},'
        b' "output": [{"type": "reasoning", "summary": []}]}'
    )
    assert thought == Choice(0, "", "length", None, None, no_text="only_thinking")
    assert thought.cause_of_no_text() == "thinking_cut"
    broken_off = answered(
        b'{"status": "incomplete", "incomplete_details": null, "output": [{"type": "message",'
        b' "content": [{"type": "output_text", "text": "the half of"}]}]}'
    )
    assert isinstance(broken_off, Choice) and unfinished_reason(broken_off.finish_reason)
    refused = answered(
        b'{"status": "completed", "output": [{"type": "message", "content":'
        b' [{"type": "refusal", "refusal": "no"}]}]}'
    )
    assert isinstance(refused, Choice) and refused.finish_reason == "content_filter"


@pytest.mark.parametrize("count", ["-1", "1180591620717411303424", "1e400", "null", "0.5"])
def test_an_answer_whose_tokens_are_miscounted_is_an_answer_without_a_count(count):
    """Check that it is kept: a retry would be paid again, and a count below 0 would be a refund."""
    from scorekit.llm.dialects import DIALECTS

    chat = '{"choices": [{"message": {"content": "12"}, "finish_reason": "stop"}], "usage": '
    chat += f'{{"prompt_tokens": {count}, "completion_tokens": 1}}}}'
    item = '{"type": "message", "content": [{"type": "output_text", "text": "12"}]}'
    response = f'{{"output": [{item}], "usage": {{"input_tokens": 1, "output_tokens": {count}}}}}'
    for name, body in (("openai", chat), ("vllm", chat), ("responses", response)):
        choices, usage = DIALECTS[name].read(body.encode(), range(1))
        assert choices[0] == Choice(0, "12", "stop", None, None)
        assert (usage.prompt_tokens, usage.completion_tokens) == (0, 0)
