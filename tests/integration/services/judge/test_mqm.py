"""The task mqm over HTTP, with an LLM that quotes carelessly, disagrees with itself, or fails."""

from __future__ import annotations

import asyncio
import json
import re

import httpx
import pandas as pd
import pytest
from typer.testing import CliRunner

from bench.kit.judge import ATTACKS, GOOD, judge, obeys, running_judge, saying
from bench.kit.openai_server import FakeOpenAI
from bench.kit.servers import running_service
from scorekit.__main__ import app
from scorekit.adapters.openrlhf import RewardServer
from scorekit.adapters.rewards import reward_settings
from scorekit.adapters.trl import reward_function
from scorekit.adapters.verl import compute_score
from scorekit.client import RemoteScorer, ScoringClient, SyncScoringClient
from scorekit.errors import UserError
from scorekit.scorers import SampleForScoring, ScoringConfig
from scorekit.server.fake import FakeBackend

MT = "그 집은 빨간색이고 그 문도 빨간색이다. “정말” 🙂 cafe\u0301"
PAIR = {
    "task": "mqm",
    "src": "The house is red, and so is the old door.",
    "mt": MT,
    "src_lang": "English",
    "tgt_lang": "ko-KR",
}
_MT_SHOWN = re.compile(r"⟦mt (\w+)⟧\n(.*)\n⟦/mt \1⟧", re.S)


def error(quote, context="", category="style", severity="minor"):
    return {"quote": quote, "context": context, "category": category, "severity": severity}


#: What the LLM finds in the translation above.
ERRORS = [
    error("빨간색", "그 문도 빨간색이다", "accuracy/mistranslation", "major"),  # it is there twice
    error("빨간색", "빨간색", "terminology"),  # which one?
    error('"정말"', '"정말" 🙂', "fluency/punctuation"),  # other marks
    error("CAFÉ", "🙂 CAFÉ", "accuracy/untranslated"),  # another case, composed
    error("빨간섹이고", "집은 빨간섹이고"),  # a slip
    error("the red house", "the red house is"),  # another language
    error("old", "the old door", "accuracy/omission", "critical"),
    error("문도 빨간", "그 문도 빨간색이다", "other", "critical"),  # over the first one
]


def answers(body, seed):
    """The errors whose quotes it knows; told outside the fence to pass it all, it does. Of several
    answers the first sees less."""
    if obeys(body["messages"]):
        return '{"errors": []}'
    text = _MT_SHOWN.search(body["messages"][1]["content"])[2]
    if text != MT:
        return json.dumps({"errors": [error(text, text, "other", "major")]})
    return json.dumps({"errors": ERRORS[:1] if seed == 0 else ERRORS})


@pytest.fixture(scope="module")
def upstream():
    fake = FakeOpenAI(respond=answers)
    with fake.running() as base:
        fake.base = base
        yield fake


@pytest.fixture(scope="module")
def url(upstream):
    with running_judge(upstream=upstream.base) as url:
        yield url


@pytest.fixture(autouse=True)
def _well(upstream):
    upstream.well()
    upstream.forget()


def test_errors_have_places_or_say_that_they_have_none(url):
    (result,) = judge(url, PAIR, cache=False)
    assert result["ok"] and result["score"] == 5 + 1 + 1 + 1 + 1 + 1 + 10 + 10
    spans = result["error_spans"]
    assert [(s["text"], s["severity"], s["category"]) for s in spans] == [
        ("문도 빨간", "CRITICAL", "other"),
        ("색", "MAJOR", "accuracy/mistranslation"),
        ("“정말”", "MINOR", "fluency/punctuation"),
        ("cafe\u0301", "MINOR", "accuracy/untranslated"),
    ]
    for span in spans:
        assert MT[span["start"] : span["end"]] == span["text"] and span["confidence"] is None
    (left,) = result["omissions"]
    assert PAIR["src"][left["start"] : left["end"]] == left["text"] == "old"
    assert [(e["quote"], e["reason"], e["of"]) for e in result["unplaced"]] == [
        ("빨간색", "ambiguous", "mt"),
        ("빨간섹이고", "absent", "mt"),
        ("the red house", "absent", "mt"),
    ]
    assert result["truncated"] == {"src": False, "mt": False, "ref": False}
    assert result["mt_covered"] == len(MT) and result["tokens"] > 10
    assert result["usage"]["completion_tokens"] > 0 and "verdict" not in result


def test_it_is_asked_for_json_of_a_schema_at_temperature_0(url, upstream):
    judge(url, PAIR, cache=False)
    (request,) = upstream.requests
    schema = request.body["response_format"]["json_schema"]["schema"]
    wanted = schema["properties"]["errors"]["items"]["properties"]
    assert list(wanted) == ["quote", "context", "category", "severity"]
    assert (request.body["temperature"], request.body["max_tokens"]) == (0.0, 2048)


def test_a_verdict_s_task_and_mqm_stand_side_by_side(url, upstream):
    upstream.respond = lambda body, seed: (
        answers(body, 1)
        if "⟦mt " in body["messages"][1]["content"]
        else '{"pass": true, "reason_code": "ok", "notes": ""}'
    )
    try:
        filtered, found = judge(url, GOOD, PAIR, cache=False)
    finally:
        upstream.respond = answers
    assert filtered["verdict"]["pass"] and found["error_spans"]
    tasks = httpx.get(f"{url}/v1/info").json()["tasks"]
    assert tasks["mqm"] == {"score_range": {"min": 0.0, "max": None}, "higher_is_better": False}
    assert tasks["translation_filter"]["higher_is_better"]


def test_an_answer_comes_from_the_cache_and_another_sample_does_not(url, upstream):
    first, second = (judge(url, PAIR | {"ref": "그 집"})[0] for _ in range(2))
    assert not first["cached"] and second["cached"] and len(upstream.requests) == 1
    assert first | {"cached": True} == second
    assert not judge(url, PAIR | {"ref": "그 문"})[0]["cached"]
    assert not judge(url, PAIR | {"src_lang": "de"})[0]["cached"]


@pytest.mark.parametrize("attack", ["plain", "json", "closes the fence", "ends the turn"])
def test_hostile_text_is_marked_as_any_other(url, attack):
    text = ATTACKS[attack].replace("candidate", "mt")
    (result,) = judge(url, PAIR | {"mt": text}, cache=False)
    assert result["score"] == 5  # the fake quotes what it is shown, fence and all
    ((span,), unplaced) = result["error_spans"], result["unplaced"]
    assert (span["start"], span["end"], unplaced) == (0, len(text), [])


def test_an_empty_translation_lacks_everything(url, upstream):
    (result,) = judge(url, PAIR | {"mt": ""})
    assert (result["score"], result["mt_covered"], result["error_spans"]) == (10, 0, [])
    (left,) = result["omissions"]
    assert (left["start"], left["end"]) == (0, len(PAIR["src"])) and "usage" not in result
    assert not upstream.requests


# -- votes ----------------------------------------------------------------------------------------


def test_several_answers_are_asked_for_at_once_and_most_of_them_count(url, upstream):
    (result,) = judge(url, PAIR, votes=3, cache=False)
    assert sorted(r.body["seed"] for r in upstream.requests) == [0, 1, 2]
    assert {r.body["temperature"] for r in upstream.requests} == {0.7}
    assert result["omissions"][0]["text"] == "old"
    (first,) = judge(url, PAIR, votes=2, cache=False, temperature=0.3)
    assert [(s["text"], s["severity"]) for s in first["error_spans"]] == [("빨간색", "MAJOR")]
    assert first["score"] == 5 and not first["omissions"] and not first["unplaced"]
    assert first["usage"]["completion_tokens"] < result["usage"]["completion_tokens"]


def test_the_service_s_own_number_of_answers_goes_where_a_request_says_none(upstream):
    with running_judge(upstream=upstream.base, mqm_votes=2) as url:
        judge(url, PAIR)
        assert len(upstream.requests) == 2
        judge(url, PAIR, votes=1)
        assert len(upstream.requests) == 3 and upstream.requests[2].body["temperature"] == 0
        assert judge(url, GOOD, cache=False)[0]["ok"] in (True, False)
        assert len(upstream.requests) <= 5


def test_where_one_answer_fails_the_sample_does(url, upstream):
    upstream.respond = lambda body, seed: "no JSON" if seed == 1 else answers(body, seed)
    try:
        (result,) = judge(url, PAIR, votes=3, cache=False)
    finally:
        upstream.respond = answers
    assert result["error"]["type"] == "model_failure"
    assert result["error"]["message"].startswith("answer 2 of 3: ")


@pytest.mark.parametrize(
    ("sample", "options", "words"),
    [
        (PAIR, {"votes": 3, "temperature": 0}, "at temperature 0 all answers agree"),
        (GOOD, {"votes": 3}, "mqm alone can be asked several times"),
        (PAIR | {"images": ["AAAA"]}, {}, "mqm wants no pictures"),
        ({k: v for k, v in PAIR.items() if k != "src_lang"}, {}, "src_lang: mqm wants it"),
    ],
)
def test_wrong_use_fails_in_one_line_and_nobody_is_asked(url, upstream, sample, options, words):
    (result,) = judge(url, sample, **options)
    assert result["error"]["type"] == "invalid_input" and words in result["error"]["message"]
    assert not upstream.requests
    said = httpx.post(f"{url}/v1/score", json={"samples": [PAIR], "options": {"votes": 10}})
    assert said.status_code == 422


def test_rules_cannot_find_errors():
    with running_judge() as url:
        (result,) = judge(url, PAIR)
        assert result["error"]["message"] == "task 'mqm' needs --backend openai"
        (result,) = judge(url, GOOD, votes=2)
        assert result["error"]["type"] == "invalid_input"
        assert "mqm" not in httpx.get(f"{url}/v1/info").json()["tasks"]


# -- failures -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "said",
    [
        "no JSON",
        "[]",
        {"errors": [error("집") | {"severity": "Fatal"}]},
        {"errors": [{}]},
        {},
        '{"errors": [{"quote": "집"}], "errors": []}',
        {"errors": [error("집" * 300_000)]},
    ],
    ids=[
        "prose",
        "a list",
        "a severity of its own",
        "an error of nothing",
        "nothing",
        "errors twice",
        "more than its tokens",
    ],
)
def test_an_answer_of_another_shape_is_asked_for_once_more_and_fails(said):
    fake = saying(said)
    with fake.running() as base, running_judge(upstream=base) as url:
        (result,) = judge(url, PAIR)
    assert result["error"]["type"] == "model_failure"
    first, second = (request.body["messages"][1]["content"] for request in fake.requests)
    assert second.startswith(first) and "not the JSON asked for" in second


def test_cut_json_and_overlong_texts_fail(url, upstream):
    upstream.cut = True
    (cut,) = judge(url, PAIR, cache=False)
    upstream.cut = False
    assert (
        cut["error"]["type"] == "model_failure" and "raise options.max_t" in cut["error"]["message"]
    )
    upstream.forget()
    (long,) = judge(url, PAIR | {"mt": "집 " * 40_000})
    assert long["error"]["type"] == "overlong" and not upstream.requests


# -- clients --------------------------------------------------------------------------------------


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

    found = asyncio.run(streamed())
    assert found[0].unplaced and found[1].score == 10


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
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.output
    first, second, third = map(json.loads, out.read_text().splitlines())
    assert first["error_spans"] and second["score"] == 5 and "windows" not in second
    assert third["omissions"][0]["text"] == "The house" and "usage" not in third
    assert [sum("⟦ref " in str(r.body) for r in upstream.requests), len(upstream.requests)] == [
        2,
        4,
    ]
    assert "lower is" in done.output and "passed" not in done.output


def test_trainers_of_others_get_rewards_from_it(url):
    settings = {"task": "mqm", "src_lang": "en", "tgt_lang_key": "lang", "offset": 5.0}
    rewards = reward_function(url, **settings)
    columns = {"src": ["The house"] * 3, "lang": ["ko", "ko", "nonsense!"]}
    assert rewards(["p"] * 3, ["집", "", "집"], **columns) == [0.0, -5.0, None]
    told = {"src": "The house", "lang": "ko"}
    assert compute_score("d", "집", "t", told, url=url, **settings) == 0.0

    async def served():
        async with ScoringClient([url]) as client:
            known = reward_settings(url=url, **settings)
            server = RewardServer(client, known)
            body = {"query": ["p집"], "prompts": ["p"], "labels": [json.dumps(told)]}
            slime = {"prompt": "p", "response": "집", "label": told}
            return (
                await server.get_reward(json.dumps(body).encode()),
                await server.remote_rm(json.dumps(slime).encode()),
            )

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
    ("settings", "told"),
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
def test_adapters_ask_a_judge_nothing_that_could_only_fail(url, upstream, settings, told):
    with pytest.raises(UserError, match=told):
        reward_function(url, **settings)(["p"], ["집"], src=["a"], l=["en"])
    assert not upstream.requests


def test_rules_have_no_points_to_give():
    with running_judge() as url, pytest.raises(UserError, match="task 'mqm': this judge has"):
        compute_score("d", "집", "t", {"src": "a"}, url=url, **LANGUAGES)


def test_every_adapter_takes_a_rubric_of_the_operator_for_a_reward(tmp_path):
    (tmp_path / "fluent.yaml").write_text(RUBRIC, encoding="utf-8")
    llm = saying({"score": 0.25, "reason_code": "so", "notes": ""})
    with llm.running() as base, running_judge(upstream=base, rubrics=tmp_path) as url:
        assert reward_function(url, task="fluent")(["p"], ["집"], src=["a"]) == [0.25]
        assert compute_score("d", "집", "t", {"src": "a"}, url=url, task="fluent") == 0.25


def test_texts_that_a_task_does_not_know_are_no_reward(url, upstream):
    """A judge's other tasks want other texts, and say so."""
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
    """A process that knows nothing yet takes what another one found."""
    found = []
    for _ in range(2):
        with running_judge(upstream=upstream.base, cache=f"sqlite://{tmp_path}/c.sqlite") as url:
            found += judge(url, PAIR)
    assert found[0] | {"cached": True} == found[1] and len(upstream.requests) == 1
