"""Test composite rewards for OpenRLHF and slime: in the server, and in its process."""

from __future__ import annotations

import asyncio
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
from scorekit.adapters.openrlhf import app as command_line
from scorekit.adapters.shared import TrainerReward, reward_settings
from scorekit.errors import UserError
from scorekit.schemas import TranslationSample
from scorekit.server.app import create_app as create_service
from scorekit.server.fake import FakeBackend, fake_score
from scorekit.server.settings import ServiceSettings
from testing.servers import JSON, PATIENCE_S, free_port, running_app, running_service, wait_until
from tests.kits import forked
from tests.kits.trainer.callers.over_http import (
    OPENRLHF_TRIES,
    SLIME_TRIES,
    openrlhf_reward,
    slime_remote_rm,
)
from tests.kits.trainer.composite_rewards import Wrapped, service_behind
from tests.kits.trainer.sick_services import (
    FAILURES,
    expected_reward,
    failure_named_by_text,
    service_with_failures,
    sick_service,
    two_metrics,
)

PROMPT = "<start_of_turn>user\nTranslate<end_of_turn>\n<start_of_turn>model\n"


@pytest.fixture(scope="module")
def metricx():
    with running_service(FakeBackend("metricx")) as url:
        yield url


def definition(metricx, xcomet, **keys):
    """Return the definition of `two_metrics` with a gate."""
    gates = {"copy": {"rule": "copy", "max_share": 0.5, "reward": -30.0}}
    return two_metrics(metricx, xcomet, gates=gates, **keys)


@contextlib.contextmanager
def served(config, clip_range=None):
    """Serve the adapter; its client uses uvicorn's loop. Yield its URL and its requests' paths."""
    settings = reward_settings(definition=config, src_key="src")
    servers, paths = [], []

    async def app(scope, receive, send):
        if not servers:
            reward = TrainerReward(settings, "the trainer")
            servers.append(create_app(RewardServer(reward, clip_range=clip_range)))
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


def openrlhf(url, mt, row):
    return openrlhf_reward([f"{url}/get_reward"], PROMPT + mt + "<eos>", PROMPT, row)


# -- answers --------------------------------------------------------------------------------------


def test_the_check_before_a_run_sends_a_sample_which_shows_what_a_service_lacks(metricx):
    parts = {"m": {"service": metricx, "field": "omissions", "scale": -1}}
    settings = reward_settings(definition={"components": parts}, src_key="src")

    async def check():
        reward = TrainerReward(settings, "the trainer")
        try:
            await reward.check(PATIENCE_S)
        finally:
            await reward.close()

    with pytest.raises(UserError, match=r"^components.m.field: .* has no omissions"):
        asyncio.run(check())


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


@pytest.mark.parametrize("content", [5, [{"text": 3}], ["a", "b"]], ids=["number", "part", "texts"])
def test_a_prompt_of_another_form_is_the_request_s_fault(metricx, content):
    body = {"prompt": [{"role": "user", "content": content}], "response": "가", "label": label("a")}
    with sick_service("") as (_, xcomet), served(definition(metricx, xcomet)) as (url, _):
        response = httpx.post(f"{url}/remote_rm", json=body)
    assert response.status_code == 422
    assert "a message's content is neither" in response.json()["error"]["message"]


def test_why_a_request_was_refused_is_logged_once_since_openrlhf_shows_the_status_alone(
    metricx, caplog
):
    wrong = {"query": ["another text"], "prompts": [PROMPT], "labels": [label("a")]}
    with sick_service("") as (_, xcomet), served(definition(metricx, xcomet)) as (url, _):
        for body in (wrong, wrong, wrong | {"labels": []}, wrong | {"prompts": []}):
            assert httpx.post(f"{url}/get_reward", json=body).status_code == 422
    lines = [r.getMessage() for r in caplog.records if r.name == "scorekit.adapters.http"]
    assert len(lines) == 2 and "HTTP 422: sample 0: the prompt does not stand" in lines[0]
    assert "say --turn-mark" in lines[0] and "different lengths" in lines[1]


def test_a_body_that_is_too_large_is_not_read_on(metricx):
    with sick_service("") as (_, xcomet), served(definition(metricx, xcomet)) as (url, _):
        with contextlib.suppress(httpx.WriteError):  # the server may close before all is sent
            parts = (b" " * 2**20 for _ in range(64))
            refused = httpx.post(f"{url}/get_reward", content=parts, headers=JSON, timeout=60)
            assert refused.status_code == 413
        assert answers(f"{url}/health")


def test_slime_gets_the_reward_as_a_number(metricx):
    with sick_service("") as (_, xcomet), served(definition(metricx, xcomet)) as (url, _):
        reward = slime_remote_rm(f"{url}/remote_rm", PROMPT, "가<|im_end|>", label("a"))
    assert type(reward) is float and reward == expected_reward("a", "가")


# -- a sick service -------------------------------------------------------------------------------


def test_a_text_without_a_reward_fails_its_request_alone(metricx):
    mts = [f"good {index}" for index in range(6)]
    with (
        service_with_failures(failure_named_by_text) as (backend, xcomet),
        served(definition(metricx, xcomet)) as (url, paths),
        ThreadPoolExecutor(20) as pool,
    ):
        futures = [pool.submit(openrlhf, url, mt, label("a")) for mt in [*mts, *FAILURES]]
        slime = pool.submit(slime_remote_rm, f"{url}/remote_rm", PROMPT, "number", label("a"))
        results = [future.result() for future in futures]
        assert slime.result() == expected_reward("a", "number")
    good, bad = results[: len(mts)], results[len(mts) :]
    assert [result["reward"] for result in good] == [[expected_reward("a", mt)] for mt in mts]
    assert bad == [{"reward": None, "scores": None, "extra_logs": {}}] * len(FAILURES)
    assert len(paths) == len(mts) + 1 + OPENRLHF_TRIES * len(FAILURES)
    scored = {mt: count for (_, mt), count in backend.scored.items() if mt not in FAILURES}
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


def test_a_refused_text_has_the_reward_that_its_definition_gives_it(metricx):
    """No answer makes OpenRLHF leave out one sample, so the user may name a reward."""
    with sick_service("refused", lambda text: text.mt == "bad") as (_, xcomet):
        config = definition(metricx, xcomet, refused_text_reward={"overlong": -25.0})
        with served(config) as (url, paths):
            result = openrlhf(url, "bad", label("a"))
    assert result["reward"] == [-25.0] and len(paths) == 1
    assert math.isnan(result["extra_logs"]["component/xcomet"][0])


def test_rewards_outside_the_clip_range_are_counted(metricx):
    config = {"components": {"size": {"rule": f"{__name__}:size"}}}
    with served(config, clip_range=(-10.0, 10.0)) as (url, _):
        answers = [openrlhf(url, "x" * count, label("a")) for count in (10, 11, 30)]
        metrics = httpx.get(f"{url}/metrics").text
    assert [answer["extra_logs"]["outside_clip_range"] for answer in answers] == [[0], [1], [1]]
    assert "scorekit_clip_checked_rewards_total 3\n" in metrics
    assert "scorekit_outside_clip_range_total 2\n" in metrics


def size(sample):
    return len(sample["mt"])


def test_concurrent_samples_share_requests():
    mts = [f"text {index}" for index in range(200)]

    async def ask(config):
        settings = reward_settings(definition=config, src_key="src")
        reward = TrainerReward(settings, "the trainer")
        bodies = [{"query": [PROMPT + mt], "prompts": [PROMPT]} for mt in mts]
        rows = [json.dumps(body | {"labels": [label("a")]}).encode() for body in bodies]
        try:
            return await asyncio.gather(*map(RewardServer(reward).get_reward, rows))
        finally:
            await reward.close()

    with service_behind(Wrapped) as (service, xcomet):
        results = asyncio.run(ask({"components": {"xcomet": {"service": xcomet}}}))
    expected = [[fake_score(sample("a", mt), 1.0)] for mt in mts]
    assert [result["rewards"] for result in results] == expected
    assert sum(service.request_sizes) == 200 and len(service.request_sizes) <= 10


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
    command += ["--clip-range", "-30", "15"]
    child = forked.Popen([*command, "--port", str(port)], stderr=subprocess.PIPE, text=True)
    url = f"http://127.0.0.1:{port}"
    try:
        with running_app(create_service(FakeBackend("xcomet"), ServiceSettings()), port=late):
            wait_until(lambda: child.poll() is not None or answers(f"{url}/health"))
            assert openrlhf(url, "가", label("a"))["reward"] == [expected_reward("a", "가")]
    finally:
        child.terminate()
        complaint = child.communicate(timeout=180)[1]
    assert "rewards of chrf, metricx, xcomet:" in complaint and "Traceback" not in complaint
    assert "warning: rewards are -30 to 15: if OpenRLHF subtracts a baseline" in complaint


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
        (["--definition", "{}"], "--clip-range -10 10 (OpenRLHF's default): rewards are -20 to 5"),
        (["--url", "{metricx}", "--clip-range", "-9", "9"], "rewards are -20 to 5"),
        (["--definition", "{}", "--clip-range", "10", "-10"], "the first number must be less"),
        (
            ["--url", "http://x", "--wait", "0.2", "--deadline", "180"],
            "--deadline: 180 s, but openrlhf waits 180 s",
        ),
        (["--definition", "{slow}"], "deadline_s: 200 s, but openrlhf waits 180 s for an answer"),
        (["--definition", "{}", "--trainer", "slime"], "deadline_s: 170 s, but slime waits 120 s"),
        (
            ["--url", "http://x", "--trainer", "slime", "--clip-range", "-20", "5"],
            "--clip-range: has no effect with --trainer slime",
        ),
    ],
)
def test_a_mistake_is_one_line(metricx, tmp_path, capsys, monkeypatch, options, message):
    service = {"service": metricx, "offset": 5.0, "scale": -1.0}
    away = service | {"service": f"http://127.0.0.1:{free_port()}"}
    definitions = {
        "{}": {"metricx": service},
        "{slow}": {"metricx": service},
        "{group}": {"metricx": service, "twice": {"rule": "duplicates"}},
        "{cut}": {"metricx": service, "cut": {"rule": "truncated"}},
        "{other}": {"metricx": service | {"scale": 1.0}},
        "{away}": {"metricx": away},
    }
    files = {
        name: {"components": components, "deadline_s": 200.0 if name == "{slow}" else 170.0}
        for name, components in definitions.items()
    }
    words = [
        write(tmp_path, files[word]) if word in files else word.replace("{metricx}", metricx)
        for word in options
    ]
    monkeypatch.setattr("uvicorn.Server.serve", serves_none)
    with pytest.raises(SystemExit) as exit_info:
        command_line(words, standalone_mode=False)
    complaint = capsys.readouterr().err
    assert exit_info.value.code == (1 if "{away}" in options else 2)
    assert message in complaint and complaint.count("\n") == 1


async def serves_none(server):
    raise AssertionError("the mistake was not found")
