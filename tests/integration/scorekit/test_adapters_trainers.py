"""Test the adapters with the trainers' requests: white space, failures, several URLs."""

from __future__ import annotations

import asyncio
import contextlib
import json
from itertools import cycle

import httpx
import pytest

from scorekit.adapters.openrlhf import RewardServer, create_app
from scorekit.adapters.shared import TrainerReward, reward_settings
from scorekit.adapters.trl import reward_function
from scorekit.adapters.verl import UnsafeRewardManager, compute_score
from scorekit.errors import SampleError, UserError
from scorekit.prompts import load_postprocess
from scorekit.schemas import TranslationSample
from scorekit.server.fake import FakeBackend, fake_score
from testing.servers import free_port, running_app, running_service, wait_until
from tests.kits.trainer.callers.over_http import (
    OPENRLHF_TRIES,
    SLIME_TRIES,
    openrlhf_reward,
    slime_remote_rm,
    verl_rate_limited,
    verl_run_single,
)
from trainer.translation.data import postprocess_translation

PROMPT = "<start_of_turn>user\nTranslate: a<end_of_turn>\n<start_of_turn>model\n"
#: As decoded by a tokenizer with a space before its words.
DECODED = " 그 집은 빨간색이다. \n"


@pytest.fixture(scope="module")
def metricx():
    with running_service(FakeBackend("metricx")) as url:
        yield url


def _reward(src, mt):
    return 5.0 - fake_score(TranslationSample(src=src, mt=mt), 25.0)


class Counting:
    """Forward requests, count them by path, and refuse the first `refusals` with 503."""

    def __init__(self, app, refusals=0):
        self.app, self.refusals, self.requests = app, refusals, []

    async def __call__(self, scope, receive, send):
        if scope["type"] == "http" and scope["method"] == "POST":
            self.requests.append(scope["path"])
            if len(self.requests) <= self.refusals:
                await send({"type": "http.response.start", "status": 503, "headers": []})
                await send({"type": "http.response.body", "body": b""})
                return
        await self.app(scope, receive, send)


@contextlib.contextmanager
def _served(url, refusals=0, **settings):
    """Serve the adapter on its own port; its client uses uvicorn's loop."""
    reward_cfg = reward_settings(url=url, **{"src_key": "label", "deadline_s": 5.0} | settings)
    app_by_name = {}

    async def app(scope, receive, send):
        if "app" not in app_by_name:
            app_by_name["app"] = create_app(RewardServer(TrainerReward(reward_cfg, "the trainer")))
        await app_by_name["app"](scope, receive, send)

    counting = Counting(app, refusals)
    with running_app(counting) as served:
        wait_until(lambda: _answers(f"{served}/health"))
        yield served, counting


def _answers(url):
    with contextlib.suppress(httpx.HTTPError):
        return httpx.get(url).status_code == 200


def test_every_adapter_scores_what_the_trainer_would(metricx):
    expected = _reward("a", postprocess_translation(DECODED))
    assert expected != _reward("a", DECODED)
    query = PROMPT + DECODED + "<end_of_turn>"
    with _served(metricx) as (url, _):
        reward = openrlhf_reward([f"{url}/get_reward"], query, PROMPT, "a")
        assert reward["reward"] == reward["scores"] == [expected]
        assert slime_remote_rm(f"{url}/remote_rm", PROMPT, DECODED + "<|im_end|>", "a") == expected
    trl = reward_function(metricx)
    chat = [[{"role": "assistant", "content": DECODED}]]
    assert trl(prompts=["p"], completions=[DECODED], src=["a"]) == [expected]
    assert trl(prompts=["p"], completions=chat, src=["a"]) == [expected]
    row = {"data_source": "d", "solution_str": DECODED, "ground_truth": "", "url": metricx}
    verl_row = row | {"extra_info": {"src": "a"}, "reward_manager": "naive"}
    assert asyncio.run(compute_score(**verl_row))["score"] == expected


def test_a_completion_may_be_scored_as_it_is_or_after_a_function_of_the_users(metricx):
    as_it_is = reward_function(metricx, postprocess="none")
    assert as_it_is(prompts=["p"], completions=[DECODED], src=["a"]) == [_reward("a", DECODED)]
    custom_reward = reward_function(metricx, postprocess="textwrap:dedent")
    assert custom_reward(prompts=["p"], completions=["  가\n  나"], src=["a"]) == [
        _reward("a", "가\n나")
    ]
    assert load_postprocess("strip") is postprocess_translation


@pytest.mark.parametrize("name", ["lower", "no.such:thing", "json:no_such", ":x"])
def test_a_postprocess_that_is_not_there_is_told_when_the_function_is_made(name):
    with pytest.raises(UserError, match="postprocess '"):
        reward_function("http://127.0.0.1:1", postprocess=name)


# -- OpenRLHF -------------------------------------------------------------------------------------


def test_openrlhf_goes_on_without_a_reward_after_five_tries(metricx):
    with _served(metricx) as (url, counting):
        reward = openrlhf_reward([f"{url}/get_reward"], PROMPT + "nan", PROMPT, "a")
    assert reward == {"reward": None, "scores": None, "extra_logs": {}}
    assert len(counting.requests) == OPENRLHF_TRIES


def test_openrlhf_passes_over_a_few_refusals(metricx):
    with _served(metricx, refusals=OPENRLHF_TRIES - 1) as (url, _):
        reward = openrlhf_reward([f"{url}/get_reward"], PROMPT + "가", PROMPT, "a")
    assert reward["reward"] == [_reward("a", "가")]


def test_openrlhf_with_two_urls_asks_them_in_turn(metricx):
    with _served(metricx) as (first_url, first), _served(metricx) as (second_url, second):
        urls = cycle([f"{first_url}/get_reward", f"{second_url}/get_reward"])
        for _ in range(2):
            reward = openrlhf_reward(urls, PROMPT + "가", PROMPT, "a")
            assert reward["reward"] == [_reward("a", "가")]
        assert len(first.requests) == len(second.requests) == 1
    dead = f"http://127.0.0.1:{free_port()}/get_reward"
    with _served(metricx) as (first_url, _):
        urls = cycle([f"{first_url}/get_reward", dead])
        rewards = [openrlhf_reward(urls, PROMPT + "가", PROMPT, "a")["reward"] for _ in range(2)]
    assert rewards == [[_reward("a", "가")], None]


# -- slime ----------------------------------------------------------------------------------------


def test_slime_gets_a_bare_number(metricx):
    label = json.dumps({"text": "a", "gold": "r"})
    prompt = [{"role": "user", "content": "Translate: a"}]
    with _served(metricx, src_key="text") as (url, _):
        reward = slime_remote_rm(f"{url}/remote_rm", prompt, "가", label)
    assert type(reward) is float and reward == _reward("a", "가")
    with _served(metricx, src_pattern="Translate: (?P<src>.*)") as (url, _):
        assert slime_remote_rm(f"{url}/remote_rm", prompt, "가", None) == _reward("a", "가")


def test_a_path_with_a_slash_behind_it_is_not_there_and_not_redirected(metricx):
    with _served(metricx) as (url, _):
        for path in ("get_reward", "remote_rm", "health"):
            response = httpx.post(f"{url}/{path}/", json={})
            assert response.status_code == 404 and "location" not in response.headers


def test_slime_raises_after_ten_tries_and_never_sees_a_number_that_is_none(metricx):
    with _served(metricx) as (url, counting):
        with pytest.raises(httpx.HTTPStatusError) as error_info:
            slime_remote_rm(f"{url}/remote_rm", PROMPT, "nan", "a")
    assert error_info.value.response.status_code == 502
    assert "non_finite" in error_info.value.response.text
    assert len(counting.requests) == SLIME_TRIES
    with _served(metricx, refusals=SLIME_TRIES - 1) as (url, _):
        assert slime_remote_rm(f"{url}/remote_rm", PROMPT, "가", "a") == _reward("a", "가")


@pytest.mark.parametrize(
    ("payload", "message"),
    [
        ({"prompt": "p"}, "response: Field required"),
        ({"prompt": "p", "response": None, "label": "a"}, "response: "),
        ({"prompt": "p", "response": "r", "label": None}, "'label' is not text but NoneType"),
    ],
)
def test_what_cannot_be_scored_is_said_to_slime(metricx, payload, message):
    with _served(metricx) as (url, _):
        response = httpx.post(f"{url}/remote_rm", json=payload)
    assert response.status_code == 422 and message in response.json()["error"]["message"]


# -- verl -----------------------------------------------------------------------------------------


def test_a_failure_is_no_reward_0_in_any_reward_manager_of_verl(metricx):
    sample = {"data_source": "d", "ground_truth": "", "extra_info": {"src": "a"}, "url": metricx}
    sample["reward_manager"] = "naive"
    good = asyncio.run(verl_run_single(compute_score, solution_str=" 가", **sample))
    assert good == _reward("a", "가")
    with pytest.raises(SampleError, match="non_finite"):
        asyncio.run(verl_run_single(compute_score, solution_str="nan", **sample))
    for manager in ("rate_limited", "batch", None):
        sample["reward_manager"] = manager
        with pytest.raises(UnsafeRewardManager, match="reward_manager"):
            asyncio.run(verl_rate_limited(compute_score, 60.0, solution_str="nan", **sample))
