"""Test the task mqm with the clients, the command and the adapters of other trainers."""

from __future__ import annotations

import asyncio
import json

import pandas as pd
import pytest
from typer.testing import CliRunner

from scorekit.__main__ import app
from scorekit.adapters.openrlhf import RewardServer
from scorekit.adapters.shared import TrainerReward, reward_settings
from scorekit.adapters.trl import reward_function
from scorekit.adapters.verl import RunEnds, compute_score
from scorekit.client import RemoteScorer, ScoringClient, SyncScoringClient
from scorekit.errors import UserError
from scorekit.scorers import SampleForScoring, ScoringConfig
from scorekit.server.fake import FakeBackend
from testing.judge import judge, running_judge, saying
from testing.servers import running_service
from tests.integration.services.judge.mqm.careless import MT, PAIR


def test_a_remote_scorer_gets_spans(url):
    samples = [
        SampleForScoring("The house", "집", src_lang="en", tgt_lang="ko", task="mqm"),
        SampleForScoring("The house", "", src_lang="en", tgt_lang="ko", task="mqm"),
        SampleForScoring("The house", "집", task="mqm"),
    ]
    with RemoteScorer(url) as scorer:
        output = scorer.score_batch(samples, ScoringConfig(cache=False))
        assert output.sequence_scores == [5, 10, None]
        (span,) = output.metadata[0].error_spans
        assert (span.start, span.end, span.severity, span.category) == (0, 1, "MAJOR", "other")
        assert output.metadata[1].omissions[0].text == "The house"
        for cfg in (ScoringConfig(overlong="windows"), ScoringConfig(max_input_length=64)):
            with pytest.raises(UserError, match="a judge reads whole texts"):
                scorer.score_batch(samples, cfg)


def test_the_async_client_streams_them(url):
    async def streamed():
        async with ScoringClient([url]) as client:
            return dict([pair async for pair in client.stream([PAIR, PAIR | {"mt": ""}])])

    results = asyncio.run(streamed())
    assert results[0].unplaced and results[1].score == 10


ROWS = [
    {"id": "a", "src": PAIR["src"], "mt": MT, "ref": None},
    {"id": "b", "src": "The house", "mt": "집", "ref": "그 집"},
    {"id": "c", "src": "The house", "mt": "", "ref": ""},
]
TASK = ["--task", "mqm", "--set", "src_lang=en", "--set", "tgt_lang=ko"]
COLUMNS = ["--variable", "src", "--variable", "mt", "--variable", "ref"]


def test_the_command_writes_spans(url, upstream, tmp_path):
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    command = ["score", "--url", url, *TASK, *COLUMNS, "--votes", "2", str(source), str(out)]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    first, second, third = map(json.loads, out.read_text().splitlines())
    assert first["error_spans"] and second["score"] == 5 and "windows" not in second
    assert third["omissions"][0]["text"] == "The house" and "usage" not in third
    assert [sum("⟦ref " in str(r.body) for r in upstream.requests), len(upstream.requests)] == [
        2,
        4,
    ]
    assert "lower is" in result.output and "passed" not in result.output


def _verl_score(extra_info, **settings):
    call = compute_score("d", "집", "t", extra_info, reward_manager="naive", **settings)
    return asyncio.run(call)["score"]


def test_trainers_of_others_get_rewards_from_it(url):
    settings = {"task": "mqm", "src_lang": "en", "tgt_lang_key": "lang", "offset": 5.0}
    rewards = reward_function(url, **settings)
    columns = {"src": ["The house"] * 3, "lang": ["ko", "ko", "nonsense!"]}
    assert rewards(["p"] * 3, ["집", "", "집"], **columns) == [0.0, -5.0, None]
    label = {"src": "The house", "lang": "ko"}
    assert _verl_score(label, url=url, **settings) == 0.0

    async def served():
        reward = TrainerReward(reward_settings(url=url, **settings), "the trainer")
        server = RewardServer(reward)
        body = {"query": ["p집"], "prompts": ["p"], "labels": [json.dumps(label)]}
        slime = {"prompt": "p", "response": "집", "label": label}
        try:
            return (
                await server.get_reward(json.dumps(body).encode()),
                await server.remote_rm(json.dumps(slime).encode()),
            )
        finally:
            await reward.close()

    openrlhf, slime = asyncio.run(served())
    assert (openrlhf["rewards"], openrlhf["extra_logs"], slime) == (
        [0.0],
        {"judge_score": [5.0]},
        0,
    )


LANGUAGES = {"task": "mqm", "src_lang": "en", "tgt_lang": "ko"}
RUBRIC = """
variables: {src: text, mt: text}
system: You judge how fluent a translation is.
user: |
  {{ src }}
  {{ mt }}
schema:
  type: object
  properties:
    score: {type: number, minimum: 0, maximum: 1}
    reason_code: {enum: [so]}
    notes: {type: string}
  required: [score, reason_code, notes]
score: {field: score, pass_from: 0.5}
temperature: 0.0
max_tokens: 64
"""


def test_adapters_refuse_what_does_not_fit_in_one_line(url):
    def reward(url, **settings):
        reward_function(url, **settings)(["p"], ["집"], src=["a"], lang=["ko"])

    with pytest.raises(UserError, match="the service is a judge: name a task"):
        reward(url)
    with pytest.raises(UserError, match="tgt_lang and tgt_lang_key: give one"):
        reward(url, task="mqm", tgt_lang="ko", tgt_lang_key="lang")
    with (
        running_service(FakeBackend("metricx")) as metricx,
        pytest.raises(UserError, match="metricx is no judge"),
    ):
        reward(metricx, task="mqm")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"task": "mqmm"}, "task 'mqmm': this judge has .*, mqm"),
        (
            {"task": "mqm", "src_lang": "en"},
            "task 'mqm' wants languages: give tgt_lang or tgt_lang",
        ),
        ({"task": "mqm", "tgt_lang_key": "l"}, "task 'mqm' wants languages: give src_lang or"),
        ({**LANGUAGES, "overlong": "windows"}, "overlong: windows: a judge reads whole texts"),
    ],
)
def test_adapters_ask_a_judge_nothing_that_could_only_fail(url, upstream, settings, message):
    with pytest.raises(UserError, match=message):
        reward_function(url, **settings)(["p"], ["집"], src=["a"], l=["en"])
    assert not upstream.requests


def test_rules_have_no_points_to_give():
    with running_judge() as url, pytest.raises(RunEnds, match="task 'mqm': this judge has"):
        _verl_score({"src": "a"}, url=url, **LANGUAGES)


def test_every_adapter_takes_a_rubric_of_the_operator_for_a_reward(tmp_path):
    (tmp_path / "fluent.yaml").write_text(RUBRIC, encoding="utf-8")
    llm = saying({"score": 0.25, "reason_code": "so", "notes": ""})
    with llm.running() as base, running_judge(upstream=base, rubrics=tmp_path) as url:
        assert reward_function(url, task="fluent")(["p"], ["집"], src=["a"]) == [0.25]
        assert _verl_score({"src": "a"}, url=url, task="fluent") == 0.25


def test_texts_that_a_task_does_not_know_are_no_reward(url, upstream):
    """Check that a judge's other tasks require other texts, and report it."""
    assert reward_function(url, task="translation_filter")(["p"], ["집"], src=["a"]) == [None]


def test_answers_are_kept_on_the_client_s_side(url, upstream, tmp_path):
    with RemoteScorer(url, cache_db=tmp_path / "cache.sqlite") as scorer:
        first, second = (scorer.score([PAIR | {"ref": "x"}])[0] for _ in range(2))
    assert not first.cached and second.cached and first.unplaced == second.unplaced
    assert first.omissions == second.omissions and len(upstream.requests) == 1


def test_a_data_frame_gets_columns_of_errors(url):
    frame = pd.DataFrame([{**PAIR, "ref": None}, {**PAIR, "mt": ""}]).drop(columns="task")
    with SyncScoringClient(url) as client:
        scored = client.score_frame(frame, task="mqm")
        with pytest.raises(UserError, match="no column 'tgt_lang'"):
            client.score_frame(frame.drop(columns="tgt_lang"), task="mqm")
    assert scored["ok"].all() and scored["unplaced"][0] and scored["error_spans"][1] == []
    assert scored["omissions"][1][0]["text"] == PAIR["src"] and "task" not in scored


def test_a_second_tier_keeps_scores_over_1(upstream, tmp_path):
    """Check that a process with an empty cache uses what another process has found."""
    results = []
    for _ in range(2):
        with running_judge(upstream=upstream.base, cache=f"sqlite://{tmp_path}/c.sqlite") as url:
            results += judge(url, PAIR)
    assert results[0] | {"cached": True} == results[1] and len(upstream.requests) == 1
