"""Check that definitions, adapters and `scorekit score` ask a reward model as any service."""

from __future__ import annotations

import json
import sys

import pytest

from scorekit.adapters.trl import reward_function
from scorekit.client import SyncScoringClient
from scorekit.errors import UserError
from scorekit.rewards import SyncCompositeReward, load_definition
from services.reward_model.prompts import ScoringPrompt
from testing.fake_reward import FakeReward
from testing.servers import running_service
from tests.kits import forked


@pytest.fixture(scope="module")
def url():
    with running_service(FakeReward()) as url:
        yield url


def scores(url, pairs):
    """Return the service's scores of (source, answer)."""
    with SyncScoringClient(url) as client:
        return [result.score for result in client.score([{"src": s, "mt": m} for s, m in pairs])]


def call(function, completions):
    return function(
        prompts=["p"] * len(completions),
        completions=completions,
        completion_ids=[[1]] * len(completions),
        src=["Is it red?"] * len(completions),
        trainer_state=object(),
    )


def test_trl_gets_the_models_score_of_the_prompt_and_the_completion(url):
    completions = ["No.", "It is."]
    expected = scores(url, [("Is it red?", text) for text in completions])
    assert call(reward_function(url, src_key="src"), completions) == pytest.approx(expected)


def test_a_definition_weighs_it_and_a_failure_is_no_reward(url):
    components = {"helpful": {"service": url, "weight": 2.0, "offset": 1.0}}
    function = reward_function(definition={"components": components}, src_key="src")
    good, bad = call(function, ["No.", "nan"])
    assert good == pytest.approx(2.0 * (1.0 + scores(url, [("Is it red?", "No.")])[0]))
    assert bad is None


def test_a_label_is_a_component_by_name_and_shares_the_score_s_request():
    fake = FakeReward()
    parts = {"helpful": 2.0, "verbose": -0.25}
    components = {
        name: {"label": name, "weight": weight, "offset": 1.0} for name, weight in parts.items()
    }
    components["all"] = {"weight": 0.5}
    with running_service(fake) as url:
        definition = {
            "components": {name: part | {"service": url} for name, part in components.items()}
        }
        before = sum(fake.batches)
        rewards = call(reward_function(definition=definition, src_key="src"), ["No.", "It is."])
        num_samples = sum(fake.batches) - before
        with SyncScoringClient(url) as client:
            results = client.score([{"src": "Is it red?", "mt": mt} for mt in ("No.", "It is.")])
    expected = [
        0.5 * r.score + sum(w * (1.0 + r.labels[name]) for name, w in parts.items())
        for r in results
    ]
    assert rewards == pytest.approx(expected) and num_samples == 2


def test_a_label_that_no_answer_has_is_named_with_those_that_there_are(url):
    component = {"service": url, "label": "polite"}
    with SyncCompositeReward({"components": {"rm": component}}) as reward:
        words = "^components.rm.label: .* has no label 'polite'; there are helpful, verbose"
        with pytest.raises(UserError, match=words):
            reward.check(probe=True)
        (result,) = reward.score([{"src": "Is it red?", "mt": "No."}])
    assert result.reward is None
    for component, words in (
        ({"service": url, "label": "helpful", "field": "pass"}, "`field` has no effect beside"),
        ({"rule": "copy", "label": "helpful"}, "`label` has no effect beside `rule`"),
    ):
        with pytest.raises(UserError, match=words):
            load_definition({"components": {"rm": component}})


def test_a_definition_that_rewards_worse_scores_and_unknown_options_are_refused(url):
    for component, words in (
        ({"service": url, "weight": -1.0}, "higher values of `score` are better"),
        ({"service": url, "options": {"overlong": "windows"}}, "overlong"),
    ):
        function = reward_function(definition={"components": {"rm": component}}, src_key="src")
        with pytest.raises(Exception, match=words):
            call(function, ["No."])


@pytest.fixture(scope="module")
def with_language():
    prompt = ScoringPrompt(text="{src} in {tgt_lang}: {mt}")
    with running_service(FakeReward(prompt=prompt)) as url:
        yield url


def test_a_prompt_with_a_language_gets_it_from_a_definition_that_says_so(with_language):
    component = {"service": with_language}
    function = reward_function(
        definition={"components": {"rm": component}}, src_key="src", tgt_lang="ko", src_lang="en"
    )
    with pytest.raises(UserError, match=r"components.rm.languages: fake needs languages"):
        call(function, ["No."])
    function = reward_function(
        definition={"components": {"rm": component | {"languages": True}}},
        src_key="src",
        src_lang="en",
        tgt_lang="ko",
    )
    with SyncScoringClient(with_language) as client:
        expected = client.score([{"src": "Is it red?", "mt": "No.", "tgt_lang": "ko"}])[0].score
    assert call(function, ["No."]) == pytest.approx([expected])


def test_a_prompt_with_a_language_gets_it_from_an_adapter_without_a_definition(with_language):
    function = reward_function(with_language, src_key="src", src_lang="en", tgt_lang="ko")
    assert None not in call(function, ["No."])
    with pytest.raises(UserError, match="fake needs languages: give src_lang or src_lang_key"):
        call(reward_function(with_language, src_key="src"), ["No."])


def test_languages_beside_a_task_are_refused():
    component = {"service": "http://h", "task": "mqm", "languages": True}
    with pytest.raises(UserError, match="`languages` are a metric's"):
        load_definition({"components": {"rm": component}})


def test_scorekit_score_writes_the_score_and_the_labels(url, tmp_path):
    source, out = tmp_path / "pairs.tsv", tmp_path / "scores.jsonl"
    source.write_text("src\tmt\nIs it red?\tNo.\nIs it red?\tIt is.\n")
    done = forked.run(
        [sys.executable, "-m", "scorekit", "score", str(source), str(out), "--url", url],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    pairs = [("Is it red?", "No."), ("Is it red?", "It is.")]
    assert [row["score"] for row in rows] == scores(url, pairs)
    assert all(set(row["labels"]) == {"helpful", "verbose"} for row in rows)
