"""Test the adapters with the call formats of OpenRLHF, verl and TRL, against a fake service."""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import sys
from types import SimpleNamespace

import httpx
import pytest

from scorekit.adapters.openrlhf import RewardServer, completion_of, create_app
from scorekit.adapters.shared import TrainerReward, reward_settings, template_pattern
from scorekit.adapters.trl import reward_function
from scorekit.adapters.verl import RunEnds, compute_score
from scorekit.errors import SampleError, ServiceUnreachable, UserError
from scorekit.prompts import TEMPLATES, fill
from scorekit.schemas import TranslationSample
from scorekit.server.fake import FakeBackend, fake_score
from testing.servers import free_port, running_app, running_service, wait_until
from tests.kits import forked


@pytest.fixture(scope="module")
def metricx():
    with running_service(FakeBackend("metricx")) as url:
        yield url


@pytest.fixture(scope="module")
def xcomet():
    with running_service(FakeBackend("xcomet")) as url:
        yield url


def _metricx(src, mt, ref=None, offset=5.0):
    return offset - fake_score(TranslationSample(src=src, mt=mt, ref=ref), 25.0)


def _xcomet(src, mt, ref=None):
    return fake_score(TranslationSample(src=src, mt=mt, ref=ref), 1.0)


# -- TRL ------------------------------------------------------------------------------------------
# trl/trainer/grpo_trainer.py, GRPOTrainer._calculate_rewards (1.16): prompts, completions and
# completion_ids by keyword, each column of the dataset as a list of the same length, and
# trainer_state, log_extra and log_metric. None becomes NaN.


def _as_trl_calls(function, prompts, completions, **columns):
    extra = {"trainer_state": object(), "log_extra": print, "log_metric": print}
    ids = [[1, 2] for _ in prompts]
    return function(
        prompts=prompts, completions=completions, completion_ids=ids, **columns, **extra
    )


def _chat(role, content):
    return [{"role": role, "content": content}]


def test_trl_with_texts(metricx):
    function = reward_function(metricx, name="metricx")
    got = _as_trl_calls(
        function,
        ["Translate: a", "Translate: b", "Translate: b"],
        ["가", "nan", ""],
        src=["a", "b", "b"],
        ref_text=["x", "y", "y"],
    )
    assert got == [_metricx("a", "가"), None, _metricx("b", "")]
    assert function.__name__ == "metricx"


def test_trl_with_chats_where_the_source_stands_in_the_prompt(xcomet):
    function = reward_function(xcomet, src_pattern=r"into Korean: (?P<src>.*)", ref_key="gold")
    prompts = [
        [*_chat("system", "You translate."), *_chat("user", f"Translate into Korean: {text}")]
        for text in ("a\nb", "c")
    ]
    completions = [_chat("assistant", "가"), _chat("assistant", [{"type": "text", "text": "다"}])]
    got = _as_trl_calls(function, prompts, completions, gold=["r", "q"])
    assert got == [_xcomet("a\nb", "가", "r"), _xcomet("c", "다", "q")]


def test_trl_s_own_trainer_reads_the_rewards(metricx):
    """Run the code of GRPOTrainer without a model."""
    torch = pytest.importorskip("torch")
    from accelerate import PartialState
    from trl import GRPOTrainer

    function = reward_function(metricx)
    trainer = SimpleNamespace(
        accelerator=SimpleNamespace(device="cpu", is_main_process=True),
        reward_funcs=[function],
        reward_processing_classes=[None],
        reward_func_names=[function.__name__],
        environments=None,
        state=SimpleNamespace(global_step=0),
        _log_completion_extra=print,
        _log_metric=print,
        args=SimpleNamespace(report_to=[]),
    )
    rows = [{"prompt": "p", "src": "a"}, {"prompt": "p", "src": "a"}]
    PartialState(cpu=True)  # its logger requires one
    try:
        got = GRPOTrainer._calculate_rewards(trainer, rows, ["p", "p"], ["가", "nan"], [[1], [2]])
    finally:
        PartialState._reset_state()
    assert got.shape == (2, 1) and torch.isnan(got[1, 0])
    assert got[0, 0].item() == pytest.approx(_metricx("a", "가"))


def test_trl_raises_where_no_service_answers():
    function = reward_function(f"http://127.0.0.1:{free_port()}", deadline_s=0.5)
    with pytest.raises(ServiceUnreachable):
        _as_trl_calls(function, ["p"], ["c"], src=["s"])


# -- verl -----------------------------------------------------------------------------------------
# verl/experimental/reward_loop/reward_manager/naive.py: one sample, all by keyword; extra_info also
# holds num_turns and rollout_reward_scores; reward_router_address and reward_model_tokenizer come
# where a reward model runs. tests/integration/scorekit/adapters/test_verl.py runs verl itself.
# reward_kwargs are merged into the call's keywords (verl/trainer/ppo/reward.py).

EXTRA = {"index": 3, "num_turns": None, "rollout_reward_scores": {}}


def _verl(function=compute_score, **call):
    """Return the reward that verl reads, as its manager `naive` calls the function."""
    return asyncio.run(function(**call, reward_manager="naive"))["score"]


def test_verl_one_by_one(metricx, xcomet):
    call = {"data_source": "wmt", "solution_str": "가", "ground_truth": "ref"}
    extra = {**EXTRA, "src": "a"}
    assert _verl(**call, extra_info=extra, url=metricx) == _metricx("a", "가")
    assert _verl(
        **call,
        extra_info=extra,
        url=xcomet,
        ref_key="ground_truth",
        reward_router_address="http://elsewhere",
        reward_model_tokenizer=None,
    ) == _xcomet("a", "가", "ref")
    call["solution_str"] = ""
    assert _verl(**call, extra_info=extra, url=metricx) == _metricx("a", "")


def test_verl_configured_by_the_environment(metricx, monkeypatch):
    monkeypatch.setenv("SCOREKIT_REWARD_URL", metricx)
    monkeypatch.setenv("SCOREKIT_REWARD_OFFSET", "7.5")
    monkeypatch.setenv("SCOREKIT_REWARD_SRC_KEY", "ground_truth")
    call = {"data_source": "wmt", "solution_str": "가", "ground_truth": "a"}
    got = _verl(**call, extra_info=dict(EXTRA))
    assert got == _metricx("a", "가", offset=7.5) and type(got) is float


def test_verl_takes_the_source_from_a_prompt_that_the_row_carries(xcomet):
    fields = {
        "source_lang": "English",
        "src_lang_code": "en",
        "target_lang": "Korean",
        "tgt_lang_code": "ko",
        "text": "a {text}\n\nb",
    }
    prompt = [{"role": "user", "content": fill(TEMPLATES["translategemma"], fields)}]
    call = {"data_source": "wmt", "solution_str": "가", "ground_truth": None}
    settings = {"url": xcomet, "src_template": "translategemma"}
    got = _verl(**call, extra_info={"prompt": prompt}, **settings)
    assert got == _xcomet("a {text}\n\nb", "가")


def test_a_failed_sample_raises_in_verl(metricx):
    call = {"data_source": "w", "ground_truth": "", "url": metricx}
    with pytest.raises(SampleError, match="sample 0: non_finite"):
        _verl(**call, solution_str="nan", extra_info={"src": "a"})
    with pytest.raises(RunEnds, match=r"there are: ground_truth, index\. Name .* src_key"):
        _verl(**call, solution_str="가", extra_info={"index": 1})


# -- OpenRLHF -------------------------------------------------------------------------------------
# openrlhf/utils/agent.py, SingleTurnAgentExecutor: POST {"query": [prompt + completion, decoded
# with special tokens], "prompts": [prompt], "labels": [label]}, one sample a request; reads
# "rewards", "scores", "extra_logs"; raise_for_status, five tries.
# openrlhf/utils/remote_rm_utils.py, older: the same, whole batches.

TURN = "<start_of_turn>user\n{}<end_of_turn>\n<start_of_turn>model\n"


@contextlib.contextmanager
def _served(url, **settings):
    """Serve the adapter on its own port; its client uses uvicorn's loop."""
    settings = reward_settings(url=url, **settings)
    app_by_name = {}

    async def app(scope, receive, send):
        if "app" not in app_by_name:
            app_by_name["app"] = create_app(RewardServer(TrainerReward(settings, "the trainer")))
        await app_by_name["app"](scope, receive, send)

    with running_app(app) as url:
        wait_until(lambda: _answers(f"{url}/health"))
        yield url


def _ask(url, samples, labels, end="<end_of_turn>"):
    prompts = [TURN.format(source) for source, _ in samples]
    queries = [prompt + mt + end for prompt, (_, mt) in zip(prompts, samples, strict=True)]
    payload = {"query": queries, "prompts": prompts, "labels": labels}
    return httpx.post(f"{url}/get_reward", json=payload)


def test_openrlhf_gets_rewards_by_a_plain_label(metricx):
    with _served(metricx, src_key="label") as url:
        response = _ask(url, [("Translate: a", "가\n나"), ("Translate: b", "")], ["a", "{b"])
    assert response.status_code == 200, response.text
    rewards = [_metricx("a", "가\n나"), _metricx("{b", "")]
    scores = [pytest.approx(5.0 - reward) for reward in rewards]
    assert response.json() == {
        "rewards": rewards,
        "scores": rewards,
        "extra_logs": {"metricx_score": scores},
    }


def test_openrlhf_gets_rewards_by_a_label_of_fields(xcomet):
    label = json.dumps({"source": "a", "gold": "r"})
    with _served(xcomet, src_key="source", ref_key="gold") as url:
        response = _ask(url, [("whatever", "가")], [label], end="<|im_end|>\n</s>")
    assert response.json()["rewards"] == [_xcomet("a", "가", "r")]


def test_openrlhf_gets_rewards_by_the_prompt_with_the_reference_as_label(xcomet):
    pattern = r"Translate: (?P<src>.*)<end_of_turn>\n<start_of_turn>model"
    with _served(xcomet, src_pattern=pattern, ref_key="label") as url:
        response = _ask(url, [("Translate: a\nb", "가")], ["r"])
        without = httpx.post(f"{url}/get_reward", json={"query": ["x"], "prompts": ["x"]})
    assert response.json()["rewards"] == [_xcomet("a\nb", "가", "r")]
    assert without.status_code == 422 and "cannot be found" in without.text


def test_a_failed_sample_fails_openrlhf_s_request(metricx):
    with _served(metricx, src_key="label") as url:
        response = _ask(url, [("p", "가"), ("p", "nan")], ["a", "b"])
    assert response.status_code == 502
    assert response.json()["error"]["message"].startswith("sample 1: non_finite")


def test_a_service_that_is_away_fails_openrlhf_s_request():
    nobody = f"http://127.0.0.1:{free_port()}"
    with _served(nobody, src_key="label", deadline_s=0.5) as url:
        response = _ask(url, [("p", "가")], ["a"])
    assert response.status_code == 502 and "cannot be reached" in response.text


@pytest.mark.parametrize(
    ("payload", "message"),
    [
        ({"prompts": ["p"]}, "query: Field required"),
        ({"query": ["pq"], "prompts": ["p", "p"]}, "different lengths"),
        ({"query": ["pq"], "prompts": ["other"], "labels": ["a"]}, "does not stand in the query"),
        ({"query": ["pq"], "prompts": ["p"], "labels": [None]}, "'label' is not text but NoneType"),
    ],
)
def test_what_cannot_be_scored_is_said_to_openrlhf(metricx, payload, message):
    with _served(metricx, src_key="label") as url:
        response = httpx.post(f"{url}/get_reward", json=payload)
    assert response.status_code == 422 and message in response.json()["error"]["message"]


@pytest.mark.parametrize(
    ("query", "mt"),
    [
        ("P x y", " x y"),
        ("<bos>P x<end_of_turn>\n<eos>", " x"),
        ("P", ""),
        ("P x </s>", " x "),
        ("P P P", " P P"),
    ],
)
def test_a_completion_is_the_query_without_prompt_and_marks(query, mt):
    assert completion_of(query, "P") == mt


def test_a_prompt_that_decoding_changed_is_left_at_the_mark_of_the_turn():
    prompt = "<user>Hi !<model>Hey<user>Translate: a .<model>"
    query = "<user>Hi!<model>Hey<user>Translate: a.<model>가 <model> 나</s>"
    assert completion_of(query, prompt, turn_mark="<model>") == "가 <model> 나"
    with pytest.raises(UserError, match="say --turn-mark"):
        completion_of(query, prompt)
    with pytest.raises(UserError, match="'<model>' does not stand in prompt and query"):
        completion_of("<model>가", prompt, turn_mark="<model>")


def test_the_openrlhf_process(metricx):
    port = free_port()
    command = [sys.executable, "-m", "scorekit.adapters.openrlhf", "--url", metricx]
    wrong = forked.run([*command, "--service", "xcomet"], capture_output=True, text=True)
    assert wrong.returncode == 2 and "is a metricx service" in wrong.stderr
    wide = forked.run(
        [*command, "--host", "0.0.0.0", "--port", str(port)],
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert wide.returncode == 2 and "say --no-auth" in wide.stderr
    command = [*command, "--clip-range", "-20", "10", "--port", str(port)]
    child = forked.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        url = f"http://127.0.0.1:{port}"
        wait_until(lambda: child.poll() is not None or _answers(f"{url}/health"))
        assert _ask(url, [("p", "가")], ["a"]).json()["rewards"] == [_metricx("a", "가")]
    finally:
        child.terminate()
        complaint = child.communicate(timeout=180)[1]
    assert "Traceback" not in complaint


def _answers(url):
    try:
        return httpx.get(url).status_code == 200
    except httpx.HTTPError:
        return False


# -- settings -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(TEMPLATES))
def test_every_template_gives_its_source_back(name):
    text = "Text:\n{text} (en) to Korean:\n\n\nend\n"
    fields = {
        "source_lang": "English (UK)",
        "src_lang_code": "en-GB",
        "target_lang": "Korean",
        "tgt_lang_code": "ko",
        "text": text,
    }
    match = template_pattern(TEMPLATES[name]).search(fill(TEMPLATES[name], fields))
    assert match["src"] == text
    assert template_pattern(TEMPLATES["teacher"]).search("Something else") is None


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "give url, or set SCOREKIT_REWARD_URL"),
        ({"url": "localhost:1"}, "is not the URL of a service"),
        ({"url": "http://x", "src_pattern": "(?P<text>.*)"}, r"no group \(\?P<src>"),
        ({"url": "http://x", "src_pattern": "("}, "src_pattern: "),
        ({"url": "http://x", "src_template": "none"}, "prompt template 'none'"),
        ({"url": "http://x", "src_template": "source", "src_pattern": "(?P<src>)"}, "one of them"),
        ({"url": "http://x", "speed": 3}, "speed: Extra inputs"),
        ({"url": "http://x", "srckey": "text"}, r"did you mean src_key\?"),
        ({"url": "http://x", "offset": float("nan")}, "offset: "),
    ],
)
def test_a_wrong_setting_is_told_when_the_function_is_made(settings, message):
    with pytest.raises(UserError, match=message):
        reward_function(**settings)
