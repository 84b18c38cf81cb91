"""Check how long a client waits for a server that has never answered."""

from __future__ import annotations

import asyncio
import builtins
import itertools
import sys
from types import ModuleType, SimpleNamespace

import pytest

from scorekit.adapters.shared import SyncTrainerReward, TrainerRow, reward_settings
from scorekit.client import ScoringClient, SyncScoringClient
from scorekit.client.embeddings import Embeddings
from scorekit.errors import ServiceUnreachable
from scorekit.interrupts import is_interactive
from scorekit.retrieval.client import Retriever
from scorekit.rewards import SyncCompositeReward
from scorekit.server.app import create_app
from scorekit.server.fake import FakeBackend
from scorekit.server.settings import ServiceSettings
from testing.servers import free_port, running_app, running_service

SAMPLES = [{"src": "a", "mt": "b"}]


@pytest.fixture(autouse=True)
def clock(monkeypatch):
    """Let each look at the clock take a second, and no pause any. Returns the seconds so far."""
    for name in ("ps1", "ps2"):
        monkeypatch.delattr(sys, name, raising=False)
    monkeypatch.delitem(sys.modules, "ipykernel", raising=False)
    monkeypatch.delattr(builtins, "__IPYTHON__", raising=False)
    seconds = itertools.count()
    fake = SimpleNamespace(monotonic=lambda: float(next(seconds)))
    monkeypatch.setattr("scorekit.net.retry.time", fake)
    monkeypatch.setattr("scorekit.net.retry._backoff", lambda state: 0.0)
    return lambda: next(seconds)


@pytest.fixture
def notebook(monkeypatch):
    monkeypatch.setitem(sys.modules, "ipykernel", ModuleType("ipykernel"))


def score(url, **settings):
    with SyncScoringClient(url, **settings) as client:
        client.score(SAMPLES)


def score_async(url, **settings):
    async def score():
        async with ScoringClient(url, **settings) as client:
            await client.score(SAMPLES)

    asyncio.run(score())


def score_with_progress(url):
    with SyncScoringClient(url) as client:
        client.score(SAMPLES, progress=True)


def embed(url, **settings):
    with Embeddings(url, model="m", **settings) as client:
        client.embed(["a"])


def search(url, **settings):
    with Retriever(url, **settings) as client:
        client.search(["a"])


def nowhere():
    return f"http://127.0.0.1:{free_port()}"


@pytest.mark.parametrize("ask", [score, score_async, embed, search])
def test_a_notebook_hears_of_a_wrong_url_after_ten_seconds(clock, notebook, ask):
    with pytest.raises(ServiceUnreachable, match=r"Nothing answers there since 10 s.*correct the"):
        ask(nowhere())
    assert clock() < 60


@pytest.mark.parametrize(
    ("ask", "deadline_s"), [(score, 900), (score_async, 900), (embed, 900), (search, 300)]
)
def test_a_script_waits_for_a_service_that_may_start_later(clock, ask, deadline_s):
    with pytest.raises(ServiceUnreachable) as error_info:
        ask(nowhere())
    assert clock() >= deadline_s and "first_answer_s" not in str(error_info.value)


@pytest.mark.parametrize("ask", [score, score_async, embed, search])
def test_the_wait_can_be_set(clock, notebook, ask):
    with pytest.raises(ServiceUnreachable, match="since 100 s"):
        ask(nowhere(), first_answer_s=100)
    assert 100 <= clock() < 200


def test_whoever_watches_a_bar_hears_of_a_wrong_url_as_well(clock):
    with pytest.raises(ServiceUnreachable, match="since 10 s"):
        score_with_progress(nowhere())
    assert clock() < 60


def test_an_adapter_waits_in_a_notebook_too(clock, notebook):
    """Check that a trainer may be started before its service."""
    settings = reward_settings(url=nowhere(), deadline_s=200.0)
    with SyncTrainerReward(settings, "TRL") as reward, pytest.raises(ServiceUnreachable):
        reward.score([TrainerRow({"src": "a"}, None, "b")])
    assert clock() >= 200


def test_a_definition_waits_in_a_notebook_too(clock, notebook):
    definition = {"components": {"xcomet": {"service": nowhere()}}, "deadline_s": 200.0}
    with SyncCompositeReward(definition) as reward:
        assert reward.score(SAMPLES)[0].reward is None
    assert clock() >= 100  # the half is for a request of several samples


def test_a_service_that_loads_is_waited_for(clock, notebook):
    """Check that a refusal counts as an answer: the service is there."""
    ready = create_app(FakeBackend(), ServiceSettings(cache="memory"))
    num_refused = 0

    async def app(scope, receive, send):
        nonlocal num_refused
        if scope["type"] == "http" and num_refused < 40:
            num_refused += 1
            await send({"type": "http.response.start", "status": 503, "headers": []})
            await send({"type": "http.response.body", "body": b""})
        else:
            await ready(scope, receive, send)

    with running_app(app) as url:
        score(url)
    assert num_refused == 40 and clock() > 40


def test_a_service_that_has_answered_may_leave_for_longer(clock, notebook):
    with running_service(FakeBackend()) as url:
        client = SyncScoringClient(url)
        assert client.score(SAMPLES)[0].ok
    start = clock()
    with client, pytest.raises(ServiceUnreachable):
        client.score([{"src": "a", "mt": "c"}])
    assert clock() - start >= 900


@pytest.mark.parametrize("name", ["ps1", "ipykernel", "__IPYTHON__"])
def test_a_prompt_and_a_notebook_are_interactive(monkeypatch, name):
    assert not is_interactive()
    if name == "ps1":
        monkeypatch.setattr(sys, name, ">>> ", raising=False)
    elif name == "ipykernel":
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    else:
        monkeypatch.setattr(builtins, name, True, raising=False)
    assert is_interactive()
