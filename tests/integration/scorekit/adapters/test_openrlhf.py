"""Test composite rewards for OpenRLHF and slime: in the server, and in its process."""

from __future__ import annotations

import contextlib
import json
import math
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
import yaml

from scorekit.adapters.openrlhf import RewardServer, create_app
from scorekit.adapters.rewards import reward_settings
from scorekit.rewards import CompositeReward
from scorekit.schemas import TranslationSample
from scorekit.server.app import create_app as create_service
from scorekit.server.fake import FakeBackend, fake_score
from scorekit.server.http.settings import ServiceSettings
from testing.servers import free_port, running_app, running_service, wait_until
from tests.kits.trainer.reward_callers import (
    OPENRLHF_TRIES,
    SLIME_TRIES,
    openrlhf_reward,
    slime_remote_rm,
)
from tests.kits.trainer.trl.sick_services import FAILURES, sick_service

PROMPT = "<start_of_turn>user\nTranslate<end_of_turn>\n<start_of_turn>model\n"


@pytest.fixture(scope="module")
def metricx():
    with running_service(FakeBackend("metricx")) as url:
        yield url


def definition(metricx, xcomet, **keys):
    """Return a definition of two services, a gate, and a rule that is only reported."""
    return {
        "components": {
            "metricx": {"service": metricx, "offset": 5.0, "scale": -1.0},
            "xcomet": {"service": xcomet, "weight": 10.0},
            "chrf": {"rule": "chrf", "weight": 0.0},
        },
        "gates": {"copy": {"rule": "copy", "max_share": 0.5, "reward": -30.0}},
        "timeout_s": 1.5,
        "deadline_s": 6.0,
        **keys,
    }


@contextlib.contextmanager
def served(config):
    """Serve the adapter; its client uses uvicorn's loop. Yield its URL and its requests' paths."""
    settings = reward_settings(definition=config, src_key="src")
    servers, paths = [], []

    async def app(scope, receive, send):
        if not servers:
            reward = CompositeReward(settings.definition)
            servers.append(create_app(RewardServer(reward, settings)))
        if scope["type"] == "http" and scope["method"] == "POST":
            paths.append(scope["path"])
        await servers[0](scope, receive, send)

    with running_app(app) as url:
        wait_until(lambda: answers(f"{url}/health"))
        yield url, paths


def answers(url):
    with contextlib.suppress(httpx.HTTPError):
        return httpx.get(url).status_code == 200


def label(src, **fields):
    return json.dumps({"src": src, **fields})


def sample(src, mt):
    return TranslationSample(src=src, mt=mt)


def expected_reward(src, mt):
    text = sample(src, mt)
    return pytest.approx(5.0 - fake_score(text, 25.0) + 10.0 * fake_score(text, 1.0))


def openrlhf(url, mt, row):
    return openrlhf_reward([f"{url}/get_reward"], PROMPT + mt + "<eos>", PROMPT, row)


# -- answers --------------------------------------------------------------------------------------


def test_openrlhf_gets_the_components_for_its_log(metricx):
    source = "a source that is copied letter by letter"
    with sick_service("") as (_, xcomet), served(definition(metricx, xcomet)) as (url, _):
        results = [
            openrlhf(url, "가", label("a", ref="가")),
            openrlhf(url, "가", label("a")),
            openrlhf(url, source, label(source)),
        ]
    (first, without_ref, copied), text = results, sample("a", "가")
    for result in (first, without_ref):
        assert result["reward"] == result["scores"] == [expected_reward("a", "가")]
    assert first["extra_logs"] == {
        "component/metricx": [fake_score(text, 25.0)],
        "component/xcomet": [fake_score(text, 1.0)],
        "component/chrf": [100.0],
        "gate_closed/copy": [0.0],
    }
    # The trainer wants the same names for every sample, and a number: NaN is no score.
    assert without_ref["extra_logs"].keys() == first["extra_logs"].keys()
    assert math.isnan(without_ref["extra_logs"]["component/chrf"][0])
    assert copied["reward"] == [-30.0] and copied["extra_logs"]["gate_closed/copy"] == [1.0]


def test_nothing_asked_is_nothing_answered_and_a_wrong_field_is_the_requests_fault(metricx):
    with sick_service("") as (_, xcomet), served(definition(metricx, xcomet)) as (url, _):
        empty = {"query": [], "prompts": [], "labels": []}
        response = httpx.post(f"{url}/get_reward", json=empty)
        assert response.json() == {"rewards": [], "scores": [], "extra_logs": {}}
        wrong = {"query": [f"{PROMPT}가"], "prompts": [PROMPT], "labels": [label("a", tgt_lang=5)]}
        response = httpx.post(f"{url}/get_reward", json=wrong)
    assert response.status_code == 422
    assert "samples.0.tgt_lang: expected the text" in response.json()["error"]["message"]


def test_slime_gets_the_reward_as_a_number(metricx):
    with sick_service("") as (_, xcomet), served(definition(metricx, xcomet)) as (url, _):
        reward = slime_remote_rm(f"{url}/remote_rm", PROMPT, "가<|im_end|>", label("a"))
    assert type(reward) is float and reward == expected_reward("a", "가")


# -- a sick service -------------------------------------------------------------------------------


@pytest.mark.parametrize("failure", FAILURES)
def test_a_text_without_a_reward_fails_its_request_alone(metricx, failure):
    is_bad = lambda text: text.mt == "bad"  # noqa: E731
    with (
        sick_service(failure, is_bad) as (backend, xcomet),
        served(definition(metricx, xcomet)) as (url, paths),
        ThreadPoolExecutor(8) as pool,
    ):
        mts = [f"good {index}" for index in range(6)]
        futures = [pool.submit(openrlhf, url, mt, label("a")) for mt in [*mts, "bad"]]
        slime = pool.submit(slime_remote_rm, f"{url}/remote_rm", PROMPT, "number", label("a"))
        *good, bad = (future.result() for future in futures)
        assert [result["reward"] for result in good] == [[expected_reward("a", mt)] for mt in mts]
        assert slime.result() == expected_reward("a", "number")
        assert bad == {"reward": None, "scores": None, "extra_logs": {}}
        assert len(paths) == len(mts) + 1 + OPENRLHF_TRIES
        scored = {mt: count for (_, mt), count in backend.scored.items() if mt != "bad"}
        assert scored == dict.fromkeys([*mts, "number"], 1)  # nothing is paid twice


@pytest.mark.parametrize("failure", ["nan", "refused"])
def test_slime_raises_and_never_sees_a_number_that_is_none(metricx, failure):
    with (
        sick_service(failure, lambda text: text.mt == "bad") as (_, xcomet),
        served(definition(metricx, xcomet)) as (url, paths),
    ):
        with pytest.raises(httpx.HTTPStatusError) as error_info:
            slime_remote_rm(f"{url}/remote_rm", PROMPT, "bad", label("a"))
    assert error_info.value.response.status_code == 502
    message = error_info.value.response.json()["error"]["message"]
    assert message.startswith("sample 0:") and "xcomet: " in message
    assert len(paths) == SLIME_TRIES


def test_a_row_without_a_component_has_no_reward(metricx):
    config = definition(metricx, metricx)
    config["components"] = {"chrf": {"rule": "chrf", "scale": 0.01}}
    with served(config) as (url, _):
        assert openrlhf(url, "가", label("a"))["reward"] is None
        assert openrlhf(url, "가", label("a", ref="가"))["reward"] == [1.0]


# -- the process ----------------------------------------------------------------------------------

COMMAND = [sys.executable, "-m", "scorekit.adapters.openrlhf"]


def write(folder, config):
    path = folder / "reward.yaml"
    path.write_text(yaml.safe_dump(config))
    return str(path)


def test_the_process_serves_a_definition_once_all_services_answer(metricx, tmp_path):
    port, late = free_port(), free_port()
    config = definition(metricx, f"http://127.0.0.1:{late}", deadline_s=20.0, timeout_s=20.0)
    command = [*COMMAND, "--definition", write(tmp_path, config), "--src-key", "src"]
    child = subprocess.Popen([*command, "--port", str(port)], stderr=subprocess.PIPE, text=True)
    url = f"http://127.0.0.1:{port}"
    try:
        with running_app(create_service(FakeBackend("xcomet"), ServiceSettings()), port=late):
            wait_until(lambda: child.poll() is not None or answers(f"{url}/health"))
            assert openrlhf(url, "가", label("a"))["reward"] == [expected_reward("a", "가")]
    finally:
        child.terminate()
        complaint = child.communicate(timeout=180)[1]
    assert "rewards of chrf, metricx, xcomet:" in complaint and "Traceback" not in complaint


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "--url and --definition: give one of them"),
        (["--definition", "{}", "--url", "http://x"], "--url and --definition: give one of them"),
        (["--definition", "gone.yaml"], "gone.yaml"),
        (["--definition", "{}", "--offset", "1"], "--offset: has no effect beside --definition"),
        (["--definition", "{}", "--overlong", "error"], "--overlong: has no effect"),
        (["--definition", "{}", "--deadline", "9"], "--deadline: has no effect"),
        (["--definition", "{}", "--task", "mqm"], "--task: has no effect"),
        (["--definition", "{}", "--service", "metricx"], "--service: has no effect"),
        (["--definition", "{group}"], "components.twice: a rule of groups, but the trainer sends"),
        (["--definition", "{cut}"], "components.cut: reads finish_reason, which the trainer"),
        (["--definition", "{other}"], "components.metricx: lower values of `score` are better"),
        (["--definition", "{away}", "--wait", "0.2"], "not ready"),
    ],
)
def test_a_mistake_is_one_line(metricx, tmp_path, options, message):
    service = {"service": metricx, "offset": 5.0, "scale": -1.0}
    away = service | {"service": f"http://127.0.0.1:{free_port()}"}
    definitions = {
        "{}": {"metricx": service},
        "{group}": {"metricx": service, "twice": {"rule": "duplicates"}},
        "{cut}": {"metricx": service, "cut": {"rule": "truncated"}},
        "{other}": {"metricx": service | {"scale": 1.0}},
        "{away}": {"metricx": away},
    }
    words = [
        write(tmp_path, {"components": definitions[word]}) if word in definitions else word
        for word in options
    ]
    done = subprocess.run([*COMMAND, *words], capture_output=True, text=True, timeout=60)
    assert done.returncode == (1 if "{away}" in options else 2)
    assert message in done.stderr and done.stderr.count("\n") == 1
