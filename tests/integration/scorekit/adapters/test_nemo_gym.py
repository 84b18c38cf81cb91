"""Test `verify` for NeMo Gym with recorded requests, and in its own resources server."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import json
import math
import os
import subprocess
from pathlib import Path

import httpx
import pytest
import yaml
from fastapi import FastAPI, Request

from scorekit.adapters.nemo_gym.reward import (
    Verifier,
    finish_reason,
    refuse_foreign_requests,
    response_text,
)
from scorekit.adapters.shared import reward_settings
from scorekit.errors import SampleError, UserError
from scorekit.schemas import TranslationSample
from scorekit.server.fake import fake_score
from testing.servers import JSON, free_port, running_app, wait_until
from tests.kits.trainer.sick_services import sick_service

ROOT = Path(__file__).parents[4]
#: Requests as an agent of NeMo Gym sends them, and what its resources server added to each.
RECORDED = json.loads((ROOT / "tests/data/nemo_gym/verify.json").read_text(encoding="utf-8"))
#: A Python that has NeMo Gym.
GYM = os.environ.get("NEMO_GYM_PYTHON", "")


@pytest.fixture(scope="module")
def xcomet():
    with sick_service("nan", lambda sample: sample.mt == "bad") as (_, url):
        yield url


def definition(xcomet, **keys):
    return {
        "components": {
            "xcomet": {"service": xcomet, "weight": 2.0},
            "cut": {"rule": "truncated", "weight": -0.5},
            "chrf": {"rule": "chrf", "weight": 0.0},
        },
        "gates": {"copy": {"rule": "copy", "max_share": 0.5, "reward": -1.0}},
        **keys,
    }


def verify(config, *requests):
    """Return what is added to each request."""

    async def run():
        verifier = Verifier(reward_settings(definition=config, src_key="text"))
        try:
            return [await verifier.verify(request) for request in requests]
        finally:
            await verifier.close()

    return asyncio.run(run())


def answering(text):
    """Return the first recorded request with another text of the policy."""
    request = copy.deepcopy(RECORDED["cases"][0]["request"])
    request["response"]["output"][-1]["content"][0]["text"] = text
    return request


# -- recorded requests ----------------------------------------------------------------------------


def test_recorded_requests_get_the_recorded_rewards(xcomet):
    cases = RECORDED["cases"]
    answers = verify(definition(xcomet), *(case["request"] for case in cases))
    assert answers == [case["answer"] for case in cases]


def test_components_add_up_to_the_reward(xcomet):
    cases = {case["name"]: case["answer"] for case in RECORDED["cases"]}
    for answer in cases.values():
        assert set(answer["reward_components"]) == {"xcomet", "cut", "gates"}
        assert math.fsum(answer["reward_components"].values()) == pytest.approx(answer["reward"])
    plain, cut = cases["plain"], cases["cut at the limit"]
    text = RECORDED["cases"][0]["request"]["response"]["output"][-1]["content"][0]["text"]
    score = fake_score(TranslationSample(src="The house is red.", mt=text), 1.0)
    assert plain["reward"] == 2.0 * score == plain["reward_components"]["xcomet"]
    assert plain["component/chrf"] == 100.0 and plain["component/xcomet"] == score
    assert cut["reward_components"]["cut"] == -0.5
    assert cases["copied"]["reward"] == -1.0 and cases["copied"]["gate_closed/copy"] == 1.0


def test_a_response_without_a_score_raises(xcomet):
    with pytest.raises(SampleError, match="non_finite"):
        verify(definition(xcomet), answering("bad"))
    request = answering("가")
    request["response"]["status"] = None
    with pytest.raises(SampleError, match="cut: no_value"):
        verify(definition(xcomet), request)
    del request["text"]
    with pytest.raises(UserError, match="no field 'text'; there are: "):
        verify(definition(xcomet), request)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"status": "cancelled"}, "response is cancelled"),
        ({"error": {"code": "server_error", "message": "no GPU"}}, "response is failed: no GPU"),
    ],
    ids=["cancelled", "error"],
)
def test_a_response_that_failed_is_no_empty_translation(xcomet, changes, message):
    request = answering("가")
    request["response"] |= {"output": [], **changes}
    with pytest.raises(SampleError, match=message):
        verify(definition(xcomet), request)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"components": {"twice": {"rule": "duplicates"}}}, "components.twice: a rule of groups"),
        ({"components": {"gates": {"rule": "chrf"}}}, "components.gates: this is the part of"),
        ({"refused_text_reward": {"overlong": -1.0}}, "refused_text_reward: NeMo Gym wants every"),
    ],
)
def test_a_definition_that_does_not_fit_is_refused(xcomet, changes, message):
    with pytest.raises(UserError, match=message):
        verify(definition(xcomet, **changes))


def test_an_application_of_nemo_gym_refuses_foreign_requests_and_takes_any_body():
    app = FastAPI()

    @app.post("/verify")
    async def verified(request: Request) -> int:
        return len(await request.body())

    refuse_foreign_requests(app, "node7", "lab.example, gym")
    body = b'"%b"' % (b"a" * 17 * 2**20)  # our own servers take 16 MiB
    with running_app(app) as url:
        for headers, status in (
            ({}, 200),
            ({"Host": "node7:8000"}, 200),
            ({"Host": "gym"}, 200),
            ({"Host": "evil.example"}, 403),
            ({"Origin": "https://evil.example"}, 403),
            ({"Sec-Fetch-Site": "cross-site"}, 403),
            ({"Content-Type": "text/plain"}, 415),
            ({"Content-Encoding": "gzip"}, 415),  # NeMo Gym would parse it as it is
            ({"Content-Encoding": "identity"}, 200),
        ):
            answer = httpx.post(f"{url}/verify", content=b"{}", headers=JSON | headers)
            assert answer.status_code == status
        assert httpx.post(f"{url}/verify", content=body, headers=JSON).json() == len(body)
    with pytest.raises(UserError, match="--allow-host: 'a b' is no host name"):
        refuse_foreign_requests(app, "node7", "a b")


def test_the_text_is_the_policy_s_last_message():
    message = {"type": "message", "role": "assistant", "content": [{"text": "가"}, {"text": "나"}]}
    call = {"type": "function_call", "name": "look_up", "arguments": "{}"}
    result = {"type": "function_call_output", "output": "text of a tool"}
    thought = {"type": "reasoning", "content": [{"text": "hm"}]}
    assert response_text({"output": [thought, message]}) == "가나"
    user = {"type": "message", "role": "user", "content": "Thank you."}
    assert response_text({"output": [message, call, result, user]}) == "가나"
    assert response_text({"output": [thought, call]}) == ""
    assert response_text({"output": []}) == ""


def test_a_response_says_how_it_ended():
    limit = {"reason": "max_output_tokens"}
    assert finish_reason({"status": "incomplete", "incomplete_details": limit}) == "length"
    assert finish_reason({"status": "completed", "incomplete_details": None}) == "stop"
    assert finish_reason({}) is None


# -- the resources server -------------------------------------------------------------------------


def answers(url):
    with contextlib.suppress(httpx.HTTPError):
        return httpx.get(f"{url}/health").status_code == 200


def environment(reward, port):
    """Return the environment in which NeMo Gym starts a server with this config."""
    config = {"entrypoint": "app.py", "domain": "other", "host": "127.0.0.1", "port": port}
    servers = {
        "head_server": {"host": "127.0.0.1", "port": free_port()},
        "dry_run": False,
        "scorekit_reward": {
            "resources_servers": {"scorekit_reward": {**config, "reward": reward, "wait_s": 60.0}}
        },
    }
    return os.environ | {
        "NEMO_GYM_CONFIG_DICT": yaml.safe_dump(servers),
        "NEMO_GYM_CONFIG_PATH": "scorekit_reward",
        "PYTHONPATH": str(ROOT),
    }


@pytest.mark.skipif(not GYM, reason="NEMO_GYM_PYTHON names no Python that has NeMo Gym 0.7")
def test_nemo_gym_s_own_server_gives_the_rewards_and_500_without_one(xcomet):
    port = free_port()
    reward = {"definition": definition(xcomet), "src_key": "text"}
    child = subprocess.Popen(
        [GYM, "-W", "ignore", "examples/nemo_gym/app.py"],
        cwd=ROOT,
        env=environment(reward, port),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    url = f"http://127.0.0.1:{port}/verify"
    try:
        wait_until(lambda: child.poll() is not None or answers(f"http://127.0.0.1:{port}"))
        got = [
            httpx.post(url, json=case["request"], timeout=60).json() for case in RECORDED["cases"]
        ]
        bad = httpx.post(url, json=answering("bad"), timeout=60)
        empty = httpx.post(url, json={})
    finally:
        child.terminate()
        complaint = child.communicate(timeout=180)[1]
    assert got, complaint
    for case, answer in zip(RECORDED["cases"], got, strict=True):
        assert answer == answer | case["request"] | case["answer"]
        assert answer["mask_sample"] is False
    assert bad.status_code == 500 and "non_finite" in bad.text and "reward" not in bad.text
    assert empty.status_code == 422
