"""Test composite rewards in TRL's own trainers, also while a service fails for some texts."""

from __future__ import annotations

import json
import math
import os
import re

import pandas as pd
import pytest
import torch

from scorekit.adapters.trl import MAX_UNREWARDED_CALLS, reward_function
from scorekit.adapters.trl_tokens import SpanRewards
from scorekit.errors import ServiceUnreachable, UserError
from scorekit.schemas import TranslationSample
from scorekit.server.fake import FakeBackend, fake_score
from testing.servers import free_port, running_service
from tests.kits import forked
from tests.kits.trainer.sick_services import (
    FAILURES,
    expected_reward,
    is_bad,
    sick_service,
    two_metrics,
)
from tests.kits.trainer.trl.runs import MarkingBackend, make_trainer


@pytest.fixture(scope="module")
def metricx():
    with running_service(FakeBackend("metricx")) as url:
        yield url


def definition(metricx, xcomet, **keys):
    """Return the definition of `two_metrics` with a rule that has a weight."""
    config = two_metrics(metricx, xcomet, **{"timeout_s": 2.0, "deadline_s": 8.0, **keys})
    config["components"]["copy"] = {"rule": "copy", "weight": -1.0}
    return config


def call(function, mts, src="s", **columns):
    """Call a reward function as TRL does; return the rewards, the metrics and the table."""
    metrics, table = {}, {}
    columns = {"src": [src] * len(mts)} | columns
    rewards = function(
        prompts=["p"] * len(mts),
        completions=mts,
        completion_ids=[[1]] * len(mts),
        trainer_state=object(),
        log_metric=lambda name, value: metrics.setdefault(name, []).append(value),
        log_extra=table.__setitem__,
        **columns,
    )
    return rewards, {name: sum(v) / len(v) for name, v in metrics.items()}, table


# -- TRL's trainer --------------------------------------------------------------------------------


def record_rewards(trainer):
    """Return the list that gets the tensor of rewards of each call."""
    calls, calculate = [], trainer._calculate_rewards

    def recording(*args, **kwargs):
        calls.append(calculate(*args, **kwargs))
        return calls[-1]

    trainer._calculate_rewards = recording
    return calls


@pytest.mark.parametrize("failure", ["", *FAILURES])
def test_a_run_of_trl_goes_on_without_the_texts_that_a_service_cannot_score(
    metricx, failure, tmp_path
):
    arguments = {"max_completion_length": 8, "log_completions": True}
    with sick_service(failure) as (backend, url):
        function = reward_function(definition=definition(metricx, url), src_key="src", name="sum")
        trainer = make_trainer(tmp_path, [function], arguments, has_tokens=False)
        (tmp_path / "completions").mkdir(exist_ok=True)
        calls = record_rewards(trainer)
        trainer.train()
    (rewards,) = calls
    (path,) = (tmp_path / "completions").glob("*.parquet")
    table = pd.read_parquet(path)
    assert trainer.state.global_step == 1 and len(table) == len(rewards) == 16
    is_scored = []
    for index, row in table.iterrows():
        src, mt = row["prompt"][0]["content"], row["completion"][0]["content"].strip()
        sample = TranslationSample(src=src, mt=mt)
        is_scored.append(not (failure and is_bad(sample)))
        reward, xcomet = rewards[index, 0].item(), row["sum/component/xcomet"]
        assert row["sum/component/metricx"] == fake_score(sample, 25.0)
        if is_scored[-1]:
            # All penalties of the rule `copy` stand in the table, too.
            copied = row["sum/component/copy"]
            assert reward == pytest.approx(expected_reward(src, mt) - copied, rel=1e-5)
            assert xcomet == fake_score(sample, 1.0) and pd.isna(row["sum/reason"])
        else:
            assert math.isnan(reward) and math.isnan(xcomet)
            assert row["sum/reason"].startswith("xcomet: ")
    assert (0 < sum(is_scored) < 16) == bool(failure)
    (line,) = (line for line in trainer.state.log_history if "loss" in line)
    assert line["sum/coverage"] == line["sum/coverage/component/xcomet"] == sum(is_scored) / 16
    assert line["sum/coverage/component/metricx"] == 1 and math.isfinite(line["loss"])
    # A row without `ref` has no chrF: no number stands for it.
    assert line["sum/coverage/component/chrf"] == 0 and "sum/component/chrf" not in line
    present = table["sum/component/xcomet"].dropna()
    assert line["sum/component/xcomet"] == pytest.approx(present.mean(), rel=1e-5)
    assert max(backend.scored.values()) == 1  # nothing is paid twice


def broken(sample):
    """Raise as a function with a mistake does."""
    raise KeyError("level")


@pytest.mark.parametrize(
    ("definition", "message"),
    [
        (
            {"components": {"copy": {"rule": "copy"}}, "gates": {"g": {"rule": "language"}}},
            "gates.g: reads the field 'tgt_lang', and no sample has it",
        ),
        ({"components": {"chrf": {"rule": "chrf"}}}, "components.chrf: reads the field 'ref'"),
        (
            {"components": {"own": {"rule": f"{__name__}:broken"}}},
            "components.own: none of the first 16 samples has a value: KeyError: 'level'",
        ),
    ],
)
def test_a_run_of_trl_ends_where_no_completion_can_have_a_reward(definition, message, tmp_path):
    function = reward_function(definition=definition, src_key="src")
    arguments = {"max_completion_length": 4, "max_steps": 2}
    trainer = make_trainer(tmp_path, [function], arguments, has_tokens=False)
    with pytest.raises(UserError, match=re.escape(message)):
        trainer.train()
    assert trainer.state.global_step == 0 and not list(tmp_path.glob("checkpoint-*"))


def test_calls_without_any_reward_end_the_run_and_a_closed_gate_does_not(metricx, caplog):
    config = definition(metricx, metricx)
    config["components"] = {"metricx": config["components"]["metricx"]}
    config["gates"] = {"copy": {"rule": "copy", "max_share": 0.5}}
    source = "a source that is copied letter by letter"
    function, alone = reward_function(definition=config), reward_function(metricx)
    for _ in range(2 * MAX_UNREWARDED_CALLS):
        assert call(function, [source], src=source)[0] == [None]
    for failing in (function, alone):
        for _ in range(MAX_UNREWARDED_CALLS - 1):
            assert call(failing, ["nan"])[0] == [None]
        assert call(failing, ["a"])[0] != [None]
        for _ in range(MAX_UNREWARDED_CALLS - 1):
            assert call(failing, ["nan"])[0] == [None]
        with pytest.raises(ServiceUnreachable, match="no completion of 8 calls has one: "):
            call(failing, ["nan"])
    assert "have no reward: metricx: non_finite" in caplog.text


def test_calls_in_which_a_gate_never_decides_end_the_run(metricx):
    """Check it for a column that is null in every row: one such row is no mistake."""
    config = definition(metricx, metricx) | {"gates": {"language": {"rule": "language"}}}
    function = reward_function(definition=config)
    for _ in range(MAX_UNREWARDED_CALLS - 1):
        assert call(function, ["a"], tgt_lang=[None])[0] == [None]
    with pytest.raises(ServiceUnreachable, match="gate language: unknown: the sample has no tgt"):
        call(function, ["a"], tgt_lang=[None])


@pytest.mark.parametrize("failure", ["429", "503", "hang"])
def test_a_service_that_answers_for_no_text_ends_the_call(metricx, failure):
    with sick_service(failure, lambda sample: sample.mt != "good") as (_, url):
        function = reward_function(definition=definition(metricx, url))
        with pytest.raises(ServiceUnreachable, match="none of 2 samples has a reward: xcomet"):
            call(function, ["a", "b"])
        assert call(function, ["good"])[0] == [expected_reward("s", "good")]
    unreachable = f"http://127.0.0.1:{free_port()}"
    function = reward_function(definition=definition(metricx, unreachable, deadline_s=0.5))
    with pytest.raises(ServiceUnreachable):
        call(function, ["a"])


def test_a_row_without_a_component_has_no_reward_and_the_others_have_one(metricx, caplog):
    config = definition(metricx, metricx)
    config["components"] = {
        "metricx": config["components"]["metricx"],
        "chrf": {"rule": "chrf", "weight": 1.0, "scale": 0.01},
    }
    function = reward_function(definition=config, name="mine")
    rewards, metrics, table = call(function, ["a", "b", "nan"], ref=["a", None, "c"])
    assert rewards == [pytest.approx(6.0 - fake_score(_sample("a"), 25.0)), None, None]
    assert table["mine/component/chrf"] == [100.0, None, 0.0]
    assert table["mine/component/metricx"][2] is None
    assert table["mine/reason"][0] is None and table["mine/reason"][1].startswith("chrf: no_value")
    assert metrics["mine/coverage"] == 1 / 3 and metrics["mine/coverage/component/chrf"] == 2 / 3
    assert metrics["mine/component/chrf"] == 50.0
    assert "mine: 2 of 3 completions have no reward: chrf: no_value" in caplog.text


def _sample(mt, src="s"):
    return TranslationSample(src=src, mt=mt)


def test_a_gate_and_a_refused_text_have_the_reward_of_the_definition(metricx):
    config = definition(metricx, metricx, refused_text_reward={"overlong": -9.0})
    config["components"] = {
        "metricx": config["components"]["metricx"] | {"options": {"overlong": "error"}}
    }
    config["gates"] = {"copy": {"rule": "copy", "max_share": 0.5, "reward": -30.0}}
    source = "a source that is copied letter by letter"
    function = reward_function(definition=config, name="mine")
    rewards, metrics, table = call(function, ["가", source, "word " * 600], src=source)
    assert rewards == [pytest.approx(5.0 - fake_score(_sample("가", source), 25.0)), -30.0, -9.0]
    assert table["mine/gate_closed/copy"] == [0.0, 1.0, 0.0]
    assert table["mine/reason"][1] == "gate copy: closed"
    assert metrics["mine/coverage"] == 1 and metrics["mine/coverage/component/metricx"] == 2 / 3


# -- what TRL passes ------------------------------------------------------------------------------


def test_tools_and_extra_columns_of_trl(metricx):
    """Only the policy's last text is scored, and a rule of the user's sees all columns."""
    config = {
        "components": {
            "metricx": {"service": metricx, "offset": 5.0, "scale": -1.0},
            "level": {"rule": f"{__name__}:level"},
        }
    }
    turns = [
        {"role": "assistant", "content": "가", "tool_calls": [{"name": "search"}]},
        {"role": "tool", "content": "a result"},
    ]
    answers = [turns, [*turns, {"role": "assistant", "content": "나"}], [turns[1]]]
    columns = {"level": [1.0, 2.0, 3.0], "environments": [object()] * 3}
    for function, extra in (
        (reward_function(definition=config), [1.0, 2.0, 3.0]),
        (reward_function(metricx), [0.0] * 3),
    ):
        rewards = call(function, answers, **columns)[0]
        expected = [5.0 - fake_score(_sample(mt), 25.0) for mt in ("가", "나", "")]
        assert rewards == [pytest.approx(a + b) for a, b in zip(expected, extra, strict=True)]


def level(sample):
    return sample["level"]


def sizes(samples):
    return [float(len(samples)) for _ in samples]


def test_groups_are_the_neighbours_with_equal_prompt_and_row():
    config = {
        "components": {"size": {"rule": f"{__name__}:sizes", "group": True}, "duplicates":
        {"rule": "duplicates", "weight": 0}}
    }  # fmt: skip
    function = reward_function(definition=config)
    chat = [{"role": "user", "content": "q"}]
    rewards = function(
        prompts=["p", "p", "p", "q", "q", chat, [dict(chat[0])], "p"],
        completions=["가", "가", "나", "가", "나", "가", "나", "가"],
        src=["s", "s", "t", "u", "u", "v", "v", "s"],
        per_completion=list(range(8)),
    )
    assert rewards == [2.0, 2.0, 1.0, 2.0, 2.0, 2.0, 2.0, 1.0]


def test_equal_rows_are_groups_of_the_size_that_is_given():
    rule = {"rule": f"{__name__}:sizes", "group": True}
    config = {"components": {"size": rule}}
    batch = {"prompts": ["p"] * 4, "completions": ["가", "나", "다", "라"], "src": ["s"] * 4}
    assert reward_function(definition=config)(**batch) == [4.0] * 4
    assert reward_function(definition=config, num_generations=2)(**batch) == [2.0] * 4
    for size, rows in ((3, batch), (4, batch | {"prompts": ["p", "p", "p", "q"]})):
        with pytest.raises(UserError, match=f"not groups of {size} equal rows"):
            reward_function(definition=config, num_generations=size)(**rows)
    with pytest.raises(UserError, match="num_generations: has no effect"):
        reward_function("http://127.0.0.1:9", num_generations=2)


def test_no_completions_have_no_rewards(metricx):
    function = reward_function(definition=definition(metricx, metricx))
    assert function(prompts=[], completions=[], src=[]) == []


def test_a_group_in_two_processes_is_a_mistake(tmp_path):
    module = "tests.kits.trainer.trl.rank_groups"
    sizes = (2, 4, 6)
    arguments = (str(tmp_path), *map(str, sizes))
    done = forked.completed(module, *arguments, environment=dict(os.environ), ranks=2)
    assert done.returncode == 0, done.stderr
    message = "per_device_train_batch_size: a process has {} completions, and a group 4."
    for rank in (0, 1):
        outputs = json.loads((tmp_path / f"{rank}.json").read_text())
        assert outputs[1] == [4.0] * 4
        for size, output in zip(sizes, outputs, strict=True):
            assert size == 4 or (len(output) == 1 and output[0].startswith(message.format(size)))


def test_a_rule_of_truncation_needs_a_column(metricx):
    config = {"components": {"cut": {"rule": "truncated", "weight": -1.0}}}
    function = reward_function(definition=config)
    with pytest.raises(
        UserError, match=r"components\.cut: reads the field 'finish_reason', and no"
    ):
        call(function, ["a"])
    assert call(function, ["a", "b"], finish_reason=["length", "stop"])[0] == [-1.0, 0.0]


# -- settings, and token advantages ---------------------------------------------------------------


def test_a_definition_is_a_file_or_a_mapping_and_a_mistake_is_told_at_once(
    metricx, tmp_path, monkeypatch
):
    path = tmp_path / "reward.yaml"
    path.write_text(f'components:\n  metricx: {{service: "{metricx}", offset: 5.0, scale: -1.0}}\n')
    expected = [5.0 - fake_score(_sample("가"), 25.0)]
    monkeypatch.setenv("SCOREKIT_REWARD_URL", "http://127.0.0.1:1")  # the argument goes first
    for source in (path, str(path)):
        assert call(reward_function(definition=source), ["가"])[0] == expected
    monkeypatch.delenv("SCOREKIT_REWARD_URL")
    monkeypatch.setenv("SCOREKIT_REWARD_DEFINITION", str(path))
    assert call(reward_function(), ["가"])[0] == expected
    assert call(reward_function(metricx, offset=4.0), ["가"])[0] == [expected[0] - 1]
    spans = SpanRewards(metricx, tokenizer=None)
    with pytest.raises(UserError, match="definition: has no token_rewards"):
        SpanRewards(tokenizer=None)
    monkeypatch.delenv("SCOREKIT_REWARD_DEFINITION")
    assert spans.credits == []
    missing_rule = {"components": {"own": {"rule": "no.such:thing"}}}
    for settings, message in (
        ({"definition": {"components": {}}}, "components"),
        ({"definition": path, "url": metricx}, "url: has no effect beside definition"),
        ({"definition": path, "offset": 1.0}, "offset: has no effect beside definition"),
        ({"definition": tmp_path / "gone.yaml"}, "gone.yaml"),
        ({"definition": missing_rule}, "no.such"),
    ):
        with pytest.raises(UserError, match=message) as error_info:
            reward_function(**settings)
        assert "\n" not in str(error_info.value)
    with pytest.raises(UserError, match="definition: has no token_rewards"):
        SpanRewards(tokenizer=None, definition=path)


def test_a_definition_works_beside_span_rewards_in_a_run(metricx, tmp_path):
    from transformers import AutoTokenizer

    from tests.kits.trainer.trl.runs import DEMO

    tokenizer = AutoTokenizer.from_pretrained(str(DEMO / "models/policy"))
    with sick_service("429") as (_, url), running_service(MarkingBackend()) as marking:
        function = reward_function(definition=definition(metricx, url), name="sum")
        spans = SpanRewards(marking, tokenizer=tokenizer, name="spans")
        trainer = make_trainer(
            tmp_path, [function, spans], {"max_completion_length": 8, "max_steps": 2}
        )
        calls = record_rewards(trainer)
        trainer.train()
    assert trainer.state.global_step == len(calls) == 2
    lines = [line for line in trainer.state.log_history if "coverage" in line]
    for rewards, line in zip(calls, lines, strict=True):
        is_scored = torch.isfinite(rewards).all(dim=1)
        assert 0 < is_scored.sum() < 16 and not torch.isfinite(rewards[~is_scored]).any()
        assert line["coverage"] == line["sum/coverage"] == is_scored.double().mean()
