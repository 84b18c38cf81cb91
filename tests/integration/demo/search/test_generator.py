"""Test the demo's generator over HTTP: our client's dialects, and refused requests."""

from __future__ import annotations

import asyncio
import base64
import io
import json

import httpx
import pytest
from PIL import Image
from pydantic import SecretStr

from demo.search.answering import NOT_SHOWN
from demo.search.generator import NAME, create_app
from demo.search.make_corpus import TRAIN
from demo.search.policy import searcher
from demo.search.reading import Reader
from scorekit.llm import LLMClient, Sampling
from scorekit.llm.wire import image_part, text_part
from testing.servers import running_app

KEY = "key-of-the-demo"
ROW = json.loads(TRAIN.read_text("utf-8").splitlines()[0])
GOLD = f"{ROW['file_name'].removesuffix('.pdf')}_{ROW['reference_page'][0]}"


@pytest.fixture(scope="module")
def url():
    with running_app(create_app(api_key=KEY)) as url:
        yield f"{url}/v1"


@pytest.fixture(scope="module")
def page():
    """Return the gold page of the first question as a PNG."""
    file = io.BytesIO()
    Reader().pages[GOLD].render(1.0).save(file, "PNG")
    return file.getvalue()


def ask(url, images, *, dialect="openai", max_tokens=64):
    async def run():
        async with LLMClient(url, NAME, api_key=SecretStr(KEY), dialect=dialect) as client:
            await client.check()
            parts = [text_part(f"Question: {ROW['question']}"), *map(image_part, images)]
            turns = [
                {"role": "system", "content": "Answer from the images."},
                {"role": "user", "content": parts},
            ]
            sampling = Sampling(max_tokens=max_tokens, effort=None)
            return (await client.chat(turns, sampling, n=1, request_id="r"))[0]

    return asyncio.run(run())


@pytest.mark.parametrize("dialect", ["vllm", "openai", "responses"])
def test_each_dialect_gives_the_answer_that_is_in_the_picture(url, page, dialect):
    choice = ask(url, [page], dialect=dialect)
    assert (choice.text, choice.finish_reason) == (ROW["reference_answer"], "stop")
    assert choice.prompt_tokens > 600 and choice.completion_tokens >= 1
    cut = ask(url, [page], dialect=dialect, max_tokens=1)
    assert (cut.text, cut.finish_reason) == (ROW["reference_answer"][:4], "length")


def test_without_the_page_the_answer_is_wrong(url):
    file = io.BytesIO()
    Image.new("RGB", (640, 360), "white").save(file, "PNG")
    assert ask(url, []).text == NOT_SHOWN
    assert ask(url, [file.getvalue()]).text == NOT_SHOWN


def test_what_cannot_be_read_is_refused(url):
    def status(image_url, model=NAME, key=KEY):
        part = {"type": "image_url", "image_url": {"url": image_url}}
        body = {"model": model, "messages": [{"role": "user", "content": [part]}]}
        head = {"Authorization": f"Bearer {key}"}
        return httpx.post(f"{url}/chat/completions", json=body, headers=head).status_code

    file = io.BytesIO()
    Image.new("RGB", (8, 8)).save(file, "PNG")
    good = "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
    assert status(good) == 200
    assert status(good, key="another") == 401
    assert status(good, model="another") == 404
    for bad in ("http://127.0.0.1:9/x.png", "data:image/png;base64,!!", good[:-40], "data:,x"):
        assert status(bad) == 400


def test_the_searcher_keeps_nothing_of_what_it_was_asked():
    fake = searcher()
    with fake.running() as base_url:
        body = {"model": fake.model, "messages": [{"role": "user", "content": "Search."}]}
        answer = httpx.post(f"{base_url}/chat/completions", json=body, timeout=60)
    assert answer.status_code == 200 and fake.requests == []
