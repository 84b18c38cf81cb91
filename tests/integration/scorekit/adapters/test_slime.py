"""Test slime's reward function, and what slime trains on while a service fails for some texts."""

from __future__ import annotations

import asyncio
import json
import math
import random

import pytest

from scorekit.adapters.shared import reward_settings
from scorekit.adapters.slime import SlimeRewards, reward
from scorekit.errors import ServiceUnreachable, UserError
from scorekit.rewards import ComponentResult, RewardResult, load_definition
from scorekit.server.fake import FakeBackend
from testing.servers import free_port, running_service
from tests.kits.trainer.callers.slime import (
    Sample,
    Status,
    score,
    slime_args,
    stock_rewards,
    train_data,
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


@pytest.fixture(scope="module")
def metricx():
    with running_service(FakeBackend("metricx")) as url:
        yield url


def groups_of(*groups, src="s", **fields):
    """Return a group of samples for each list of translations."""
    label = json.dumps({"src": src, **fields})
    samples = [
        [Sample(response=mt, label=label, group_index=number) for mt in mts]
        for number, mts in enumerate(groups)
    ]
    for index, sample in enumerate(sample for group in samples for sample in group):
        sample.index = index
    return samples


def args_for(definition, **values):
    return slime_args(scorekit={"definition": definition}, **values)


# -- rewards --------------------------------------------------------------------------------------


def test_a_text_without_a_score_leaves_the_loss_and_its_group(metricx):
    bad = FAILURES
    groups = groups_of(["가", "나", *bad], ["다", "라", "마"])
    with service_with_failures(failure_named_by_text) as (backend, xcomet):
        args = args_for(two_metrics(metricx, xcomet))
        samples = score(args, groups)
    data = train_data(args, samples)
    good = [s for s in samples if s.response not in bad]
    assert [s.reward for s in good] == [expected_reward("s", s.response) for s in good]
    for index, sample in enumerate(samples):
        is_good = sample.response not in bad
        assert sample.remove_sample is not is_good
        assert data["loss_masks"][index] == [int(is_good)] * 3
        if not is_good:
            assert math.isnan(sample.reward) and data["rewards"][index] == 0.0
            service = "metricx" if sample.response == "nan" else "xcomet"  # both give no number
            assert sample.metadata["scorekit_no_reward"].startswith(f"{service}: ")
    for mts in (["가", "나"], ["다", "라", "마"]):
        values = [expected_reward("s", mt) for mt in mts]
        stock = stock_rewards(slime_args(n_samples_per_prompt=len(mts)), values)
        rewards = [data["rewards"][s.index] for s in samples if s.response in mts]
        assert rewards == pytest.approx(stock, rel=1e-5)
    raw = [sample.reward for sample in good]
    assert sum(data["raw_reward"]) / len(samples) == pytest.approx(sum(raw) / len(raw))
    scored = {mt: count for (_, mt), count in backend.scored.items() if mt not in bad}
    assert scored == dict.fromkeys([s.response for s in good], 1)  # nothing is paid twice


def test_what_the_policy_could_not_finish_is_no_empty_translation(metricx):
    args = args_for({"components": {"metricx": {"service": metricx, "scale": -1.0}}})
    groups = groups_of(["가", "", "나"])
    groups[0][1].status = Status.FAILED
    samples = score(args, groups)
    assert [math.isnan(sample.reward) for sample in samples] == [False, True, False]
    assert [sample.remove_sample for sample in samples] == [False, True, False]
    assert samples[1].metadata["scorekit_no_reward"] == "slime: failed"


def test_slime_logs_the_components_and_their_coverage(metricx):
    config = two_metrics(metricx, metricx)
    config["components"] = {
        "metricx": config["components"]["metricx"],
        "xcomet": {"service": metricx, "scale": -1.0, "reference": True, "weight": 0.0},
    }
    groups = groups_of(["가", "nan"])
    samples = score(args := args_for(config), groups)
    (metrics,) = train_data(args, samples)["metrics"]
    assert metrics == {
        "reward/coverage": 0.5,
        "reward/coverage/component/metricx": 0.5,
        "reward/component/metricx": 5.0 - samples[0].reward,
        "reward/coverage/component/xcomet": 0.0,
    }
    assert samples[0].metadata["scorekit_stats"] == {
        "component/metricx": 5.0 - samples[0].reward,
        "component/xcomet": None,
    }


def test_a_reward_key_gives_a_dict_with_the_components(metricx):
    config = {"components": {"metricx": {"service": metricx, "offset": 5.0, "scale": -1.0}}}
    args = args_for(config, reward_key="reward", eval_reward_key="score")
    (sample,) = score(args, groups_of(["가<|im_end|>"]))
    number = sample.reward["reward"]
    assert sample.reward == {
        "component/metricx": 5.0 - number,
        "reward": number,
        "score": number,
    }
    assert train_data(args, [sample])["raw_reward"] == [number]


def test_a_group_is_scored_together_and_slime_s_status_is_its_finish_reason():
    config = {
        "components": {
            "duplicates": {"rule": "duplicates", "weight": -1.0},
            "cut": {"rule": "truncated", "weight": -2.0},
        }
    }
    groups = groups_of(["가", "가", "나"], ["가"])
    groups[0][2].status = Status.TRUNCATED
    samples = score(args_for(config, group_rm=True), groups)
    assert [sample.reward for sample in samples] == [-0.5, -0.5, -2.0, 0.0]
    groups[1][0].status = Status.ABORTED  # nobody knows how it would have ended
    (sample,) = score(args_for(config, group_rm=True), [groups[1]])
    assert math.isnan(sample.reward) and sample.remove_sample
    sample.status = Status.COMPLETED
    score(args_for(config, group_rm=True), [groups[1]])
    assert sample.reward == 0.0 and not sample.remove_sample
    assert "scorekit_no_reward" not in sample.metadata


def test_one_service_gives_rewards_without_a_definition(metricx):
    settings = {"url": metricx, "src_key": "label", "offset": 4.0}
    sample = Sample(prompt=[{"role": "user", "content": "Translate."}], response="가", label="s")
    score(slime_args(scorekit=settings), [[sample]])
    by_definition = {"components": {"metricx": {"service": metricx, "offset": 4.0, "scale": -1.0}}}
    (other,) = score(args_for(by_definition), groups_of(["가"]))
    assert sample.reward == other.reward


def test_the_settings_come_from_the_environment_too(metricx, monkeypatch):
    monkeypatch.setenv("SCOREKIT_REWARD_URL", metricx)
    monkeypatch.setenv("SCOREKIT_REWARD_SRC_KEY", "source")
    sample = Sample(response="가", metadata={"source": "s"}, label="text")
    score(slime_args(), [[sample]])
    (other,) = score(slime_args(scorekit={"url": metricx, "src_key": "src"}), groups_of(["가"]))
    assert sample.reward == other.reward


def test_samples_that_are_scored_at_once_share_requests():
    groups = groups_of(*([f"text {group} {number}" for number in range(8)] for group in range(25)))
    with service_behind(Wrapped) as (service, url):
        config = {"components": {"xcomet": {"service": url}}, "batch_size": 64}
        samples = score(args_for(config), groups)
    assert all(math.isfinite(sample.reward) for sample in samples)
    assert sum(service.request_sizes) == 200 and len(service.request_sizes) <= 10


def test_a_text_that_fails_after_all_others_leaves_the_loss_alone(metricx):
    ((good, bad),) = groups_of(["가", "garbage"])

    async def score_in_turn(xcomet):
        args = args_for(two_metrics(metricx, xcomet))
        return [await reward(args, sample) for sample in (good, bad)]

    with service_with_failures(failure_named_by_text) as (_, xcomet):
        rewards = asyncio.run(score_in_turn(xcomet))
    assert rewards[0] == expected_reward("s", "가") and math.isnan(rewards[1])
    assert bad.remove_sample and not good.remove_sample


class InOrder:
    """A composite reward that fails at once for "bad", and scores others when `answers` is set."""

    definition = load_definition({"components": {"length": {"rule": "length"}}})

    def __init__(self, definition):
        self.answers = asyncio.Event()

    async def score(self, samples, groups):
        if samples[0]["mt"] == "bad":
            return [RewardResult(None, "away", {"x": ComponentResult(1.0, "upstream")})]
        await self.answers.wait()
        return [RewardResult(1.0)]


@pytest.mark.parametrize("is_outage", [False, True])
def test_a_text_that_fails_before_all_others_waits_for_them(monkeypatch, is_outage):
    monkeypatch.setattr("scorekit.adapters.shared.CompositeReward", InOrder)
    ((good, bad),) = groups_of(["good", "bad"])

    async def run():
        rewards = SlimeRewards(reward_settings(definition=InOrder.definition, src_key="src"))
        tasks = [asyncio.create_task(rewards.score([s], is_group=False)) for s in (good, bad)]
        for _ in range(20):  # the second call fails within a few steps of the loop
            await asyncio.sleep(0)
        assert not any(task.done() for task in tasks)
        if is_outage:
            tasks[0].cancel()
        else:
            rewards._reward._composite.answers.set()
        return await asyncio.gather(*tasks, return_exceptions=True)

    first, second = asyncio.run(run())
    if is_outage:
        assert isinstance(first, asyncio.CancelledError) and isinstance(second, ServiceUnreachable)
    else:
        assert first[0].reward == 1.0 and second[0].reward is None


# -- outages --------------------------------------------------------------------------------------


@pytest.mark.parametrize("group_rm", [False, True])
def test_a_service_that_answers_for_no_text_ends_the_run(metricx, group_rm):
    with sick_service("503", lambda sample: True) as (_, xcomet):
        config = two_metrics(metricx, xcomet, timeout_s=0.5, deadline_s=1.0)
        with pytest.raises(ServiceUnreachable, match="has a reward: xcomet"):
            score(args_for(config, group_rm=group_rm), groups_of(["가", "나"]))
    away = f"http://127.0.0.1:{free_port()}"
    for settings in (
        {"definition": two_metrics(metricx, away, timeout_s=0.5, deadline_s=1.0)},
        {"url": away, "deadline_s": 0.5},
    ):
        with pytest.raises(ServiceUnreachable):
            score(slime_args(scorekit=settings, group_rm=group_rm), groups_of(["가"]))


def test_a_rollout_without_any_reward_ends_the_run(metricx):
    args = slime_args(scorekit={"url": metricx})
    samples = score(args, groups_of(["nan"], ["nan"]))
    with pytest.raises(ServiceUnreachable, match="none of 2 samples of a rollout has one"):
        train_data(args, samples)


# -- what slime trains on -------------------------------------------------------------------------


@pytest.mark.parametrize("scales", [True, False])
@pytest.mark.parametrize("normalizes", [True, False])
@pytest.mark.parametrize(
    "estimator",
    ["grpo", "gspo", "cispo", "reinforce_plus_plus_baseline", "ppo", "reinforce_plus_plus"],
)
def test_without_failures_the_rewards_are_those_of_slime_s_own_function(
    estimator, normalizes, scales
):
    args = slime_args(
        advantage_estimator=estimator,
        rewards_normalization=normalizes,
        grpo_std_normalization=scales,
        rollout_batch_size=6,
    )
    generator = random.Random(1)
    values = [generator.uniform(-20.0, 5.0) for _ in range(24)]
    for has_index in (True, False):
        samples = [
            Sample(reward=value, group_index=index // 4 if has_index else None)
            for index, value in enumerate(values)
        ]
        data = train_data(args, samples)
        # slime computes in float32, whose deviation of four such numbers errs by some 1e-6.
        assert data["rewards"] == pytest.approx(stock_rewards(args, values), rel=1e-4, abs=1e-4)
        assert data["raw_reward"] == values


@pytest.mark.parametrize("estimator", ["grpo", "ppo"])
def test_a_failed_sample_moves_no_other(estimator):
    args = slime_args(advantage_estimator=estimator)
    values = [[1.0, 2.0, 6.0, math.nan], [math.nan] * 2 + [4.0], [math.nan, math.nan]]
    samples = [Sample(reward=v, group_index=g) for g, group in enumerate(values) for v in group]
    data = train_data(args, samples)
    mean = (1.0 + 2.0 + 6.0 + 4.0) / 4
    assert data["raw_reward"] == [1.0, 2.0, 6.0, mean, mean, mean, 4.0, mean, mean]
    if estimator == "ppo":
        assert data["rewards"] == data["raw_reward"]
    else:
        three = stock_rewards(slime_args(n_samples_per_prompt=3), [1.0, 2.0, 6.0])
        assert data["rewards"] == pytest.approx([*three, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0], rel=1e-5)


# -- mistakes -------------------------------------------------------------------------------------

RULE = {"components": {"length": {"rule": "length"}}}
GROUP_RULE = {"components": {"same": {"rule": "duplicates"}}}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({}, "no scoring service: give url"),
        ({"scorekit": {"url": 8001}}, "url: 8001 is no URL. Give one as a text"),
        ({"scorekit": {"url": [None]}}, r"url: \[None\] is no URL"),
        ({"scorekit": ["url"]}, r"scorekit: \['url'\] are no settings"),
        ({"scorekit": {"definition": RULE, "offset": 1.0}}, "offset: has no effect beside"),
        ({"scorekit": {"definition": GROUP_RULE}}, "rule of groups. Start slime with --group-rm"),
        ({"custom_reward_post_process_path": None}, "Set scorekit.adapters.slime.post_process"),
        ({"advantage_estimator": "other"}, "--advantage-estimator: other. Choose one of grpo"),
        ({"eval_reward_key": "score"}, "--eval-reward-key: needs --reward-key"),
        ({"scorekit": {"definition": RULE, "src_key": "text"}}, "no field 'text'; there are"),
    ],
)
def test_a_mistake_ends_the_run_with_one_line(values, message):
    with pytest.raises(UserError, match=message) as error_info:
        score(slime_args(**values), groups_of(["가"]))
    assert "\n" not in str(error_info.value)
