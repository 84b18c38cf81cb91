"""Test the demo's teacher: its samples depend on prompt, settings and seed alone."""

from __future__ import annotations

import asyncio

import httpx
import pytest
from pydantic import SecretStr

from demo.llm_server import MODEL, NAME, create_app, load_sampler
from scorekit.errors import UserError
from scorekit.llm import LLMClient, LLMError, Sampling
from testing.servers import running_app

KEY = "key-of-the-demo"
LINE = "Continue listening for wake word"


@pytest.fixture(scope="module")
def url():
    with running_app(create_app(load_sampler(MODEL, threads=1), api_key=KEY)) as url:
        yield f"{url}/v1"


def ask(url, *texts, n=1, strategy="auto", model=NAME, key=KEY, **sampling):
    """Return the choices for each text, all requested at once."""
    settings = Sampling(**{"max_tokens": 32, "seed": 5, **sampling})

    async def run():
        async with LLMClient(url, model, api_key=SecretStr(key), strategy=strategy) as client:
            await client.check()
            system = {"role": "system", "content": "You are a professional translator."}
            turns = [[system, {"role": "user", "content": text}] for text in texts]
            work = [client.chat(turn, settings, n=n, request_id="r") for turn in turns]
            return await asyncio.gather(*work)

    return asyncio.run(run())


def test_a_choice_is_the_same_alone_and_in_a_crowd(url):
    (one_request,) = ask(url, LINE, n=16)
    crowd = ask(url, LINE, *[f"{LINE} {'Really? ' * i}" for i in range(24)], n=16)
    alone = ask(url, LINE, n=16, strategy="per_call")
    assert one_request == crowd[0]
    assert [c.text for c in one_request] == [c.text for c in alone[0]]
    assert ask(url, LINE, seed=5 + 9)[0][0].text == one_request[9].text
    assert len({c.text for c in one_request}) > 8


def test_temperature_0_is_greedy_and_knows_no_seed(url):
    first, second = (ask(url, LINE, temperature=0.0, seed=seed)[0][0] for seed in (1, 2))
    assert first == second and first.finish_reason == "stop"
    narrow = ask(url, LINE, n=4, top_p=1e-6)[0]
    assert {c.text for c in narrow} == {first.text}


def test_tokens_are_counted_and_texts_cut(url):
    cut = ask(url, LINE, max_tokens=2)[0][0]
    assert cut.finish_reason == "length" and cut.completion_tokens == 2
    full_choice = ask(url, LINE, temperature=0.0)[0][0]
    stop = full_choice.text[2]
    stopped = ask(url, LINE, temperature=0.0, stop=(stop,))[0][0]
    assert stopped.text == full_choice.text.partition(stop)[0] and stopped.finish_reason == "stop"


def test_mistakes_are_told_in_the_words_of_vllm(url):
    with pytest.raises(UserError, match="refused the API key"):
        ask(url, LINE, key="wrong")
    with pytest.raises(UserError, match=f"it serves '{NAME}'"):
        ask(url, LINE, model="nope")
    with pytest.raises(LLMError, match="maximum context length is 256") as error:
        ask(url, "delete " * 300)
    assert error.value.type == "overlong"


@pytest.mark.parametrize("field", [{"repetition_penalty": 1.2}, {"stream": True}, {"logprobs": 1}])
def test_what_it_cannot_do_is_refused(url, field):
    body = {"model": NAME, "messages": [{"role": "user", "content": LINE}], **field}
    headers = {"Authorization": f"Bearer {KEY}"}
    answer = httpx.post(f"{url}/chat/completions", json=body, headers=headers)
    assert answer.status_code == 400
    assert next(iter(field)) in answer.json()["error"]["message"]
