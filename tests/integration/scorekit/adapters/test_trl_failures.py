"""Test TRL's reward functions, and a run of its trainer, while a service fails for some texts."""

from __future__ import annotations

import json
import math
from contextlib import contextmanager

import pytest
import torch

from scorekit.adapters.trl import reward_function
from scorekit.adapters.trl_tokens import SpanRewards
from scorekit.errors import ScorekitError, UserError
from scorekit.schemas import TranslationSample
from scorekit.server.app import create_app
from scorekit.server.fake import FakeBackend, fake_score
from scorekit.server.settings import ServiceSettings
from testing.flaky_server import FAULTS, FlakyServer
from testing.servers import PATIENCE_S, free_port, running_app, running_service
from tests.kits.trainer.runs import byte_level_tokenizer
from tests.kits.trainer.trl.runs import (
    IMPATIENT,
    MarkingBackend,
    make_trainer,
    reward_funcs,
)

TEXTS = ["good", "bad", "fine", "good"]


@contextmanager
def failing(backend, failure, is_bad):
    """Serve a backend behind a server that fails for each request with a bad sample."""

    def mood(path, body):
        if path != "/v1/score":
            return None
        samples = [TranslationSample.model_validate(s) for s in json.loads(body)["samples"]]
        return failure if any(map(is_bad, samples)) else None

    settings = ServiceSettings(cache="memory", stall_after=PATIENCE_S)
    flaky = FlakyServer(create_app(backend, settings), mood)
    with running_app(flaky) as url:
        backend.batches.clear()  # those of the warm-up
        yield url, flaky
        flaky.recover()


def call(function, texts, tokenizer, **columns):
    """Call a reward function as TRL does."""
    ids = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
    columns = {"src": ["s"] * len(texts)} | columns
    extra = {"trainer_state": object(), "log_extra": print, "log_metric": print}
    prompts = ["p"] * len(texts)
    return function(prompts=prompts, completions=texts, completion_ids=ids, **columns, **extra)


@pytest.mark.parametrize("failure", FAULTS)
def test_a_text_that_breaks_its_request_costs_no_other_text_its_reward(failure):
    tokenizer, backend = byte_level_tokenizer(), FakeBackend("xcomet")
    expected = [fake_score(TranslationSample(src="s", mt=text), 1.0) for text in TEXTS]
    expected[1] = None
    with failing(backend, failure, lambda sample: sample.mt == "bad") as (url, flaky):
        spans = SpanRewards(url, tokenizer=tokenizer, **IMPATIENT)
        for function in (reward_function(url, **IMPATIENT), spans):
            assert call(function, TEXTS, tokenizer) == expected
        # Each text is scored once. A request that hung reaches the model when it is given up.
        assert sum(backend.batches) == (3 if failure == "hang" else 2)
        assert [credit is None for credit in spans.credits] == [False, True, False, False]
        assert spans.token_rewards()[1] is None and any(spans.token_rewards()[0])
        flaky.recover()
        if failure != "500":  # the client avoids for an hour what seemed to end a server
            assert call(spans, TEXTS, tokenizer)[1] is not None and None not in spans.credits


@pytest.mark.parametrize("failure", ["429", "500", "503", "hang", "cut"])
def test_a_service_that_answers_for_no_text_ends_the_call(failure):
    tokenizer = byte_level_tokenizer()
    with failing(FakeBackend("xcomet"), failure, lambda sample: sample.mt in TEXTS) as (url, _):
        spans = SpanRewards(url, tokenizer=tokenizer, **IMPATIENT)
        assert None not in call(spans, ["another"], tokenizer) + spans.credits
        if failure == "500":  # each text by itself: none of them has a reward
            assert call(spans, TEXTS, tokenizer) == [None] * 4
        else:
            with pytest.raises(ScorekitError):
                call(spans, TEXTS, tokenizer)
        assert spans.credits == [None] * 4  # not those of an earlier call
    unreachable = SpanRewards(
        f"http://127.0.0.1:{free_port()}", tokenizer=tokenizer, deadline_s=0.5
    )
    with pytest.raises(ScorekitError):
        call(unreachable, TEXTS, tokenizer)


def test_texts_that_are_refused_or_have_no_finite_score_have_no_reward():
    tokenizer = byte_level_tokenizer()
    texts = ["good", "a nan", "x\0y", "word " * 600]
    with running_service(FakeBackend("xcomet")) as url:
        spans = SpanRewards(url, tokenizer=tokenizer, overlong="error")
        rewards = call(spans, texts, tokenizer)
        assert rewards[1:] == [None] * 3 and rewards[0] is not None
        assert [credit is None for credit in spans.credits] == [False, True, True, True]


class Straying(FakeBackend):
    """Marks a span past the end of one text."""

    def _outcome(self, sample):
        outcome = super()._outcome(sample)
        if sample.mt == "bad":
            outcome["error_spans"] = [{"start": 1, "end": 9, "severity": "MAJOR"}]
        return outcome


def test_spans_that_do_not_fit_the_text_leave_one_completion_without_a_reward(caplog):
    tokenizer = byte_level_tokenizer()
    with running_service(Straying("xcomet")) as url:
        spans = SpanRewards(url, tokenizer=tokenizer, name="xcomet")
        rewards = call(spans, TEXTS, tokenizer)
    assert [reward is None for reward in rewards] == [False, True, False, False]
    assert "a span is outside the text of 3" in caplog.text


def test_a_service_without_spans_is_a_mistake(tmp_path):
    tokenizer = byte_level_tokenizer()
    with running_service(FakeBackend("metricx")) as url:
        spans = SpanRewards(url, tokenizer=tokenizer, name="mine")
        with pytest.raises(UserError, match="metricx: the service marks no error spans"):
            call(spans, TEXTS, tokenizer)


def test_a_completion_of_several_messages_is_refused():
    spans = SpanRewards("http://127.0.0.1:1", tokenizer=byte_level_tokenizer())
    messages = [{"role": role, "content": "x"} for role in ("assistant", "tool", "assistant")]
    with pytest.raises(UserError, match="several messages"):
        spans(prompts=["p"], completions=[messages], completion_ids=[[1]], src=["s"])


@pytest.mark.parametrize("failure", ["429", "500", "hang", "garbage"])
def test_a_run_goes_on_without_the_texts_that_the_service_cannot_score(failure, tmp_path):
    def is_bad(sample):
        return fake_score(sample, 1.0) < 0.3

    with (
        running_service(FakeBackend("metricx")) as metricx,
        failing(MarkingBackend(), failure, is_bad) as (xcomet, _),
    ):
        functions = reward_funcs(metricx, xcomet, **IMPATIENT)
        trainer = make_trainer(tmp_path, functions, {"max_steps": 2, "max_completion_length": 8})
        seen = []
        compute = trainer._advantages

        def recording(*args):
            seen.append((trainer._rewards, *compute(*args)))
            return seen[-1][1:]

        trainer._advantages = recording
        trainer.train()
    assert trainer.state.global_step == len(seen) == 2
    for rewards, advantages, is_scored in seen:
        assert not (rewards == 0).any()  # a failure is no number
        assert torch.isfinite(rewards).all(dim=1).tolist() == is_scored
        assert 0 < sum(is_scored) < 16
        assert all(any(row) == scored for row, scored in zip(advantages, is_scored, strict=True))
    losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    assert len(losses) == 2 and all(map(math.isfinite, losses))


# -- missing components ---------------------------------------------------------------------------


def test_a_completion_that_one_function_could_not_score_has_no_reward(tmp_path):
    """Check None, NaN and infinity; TRL alone would count None as 0, and infinity."""
    values = [None, math.nan, math.inf, -2.0, *[-1.0] * 12]

    def partial(prompts, **_):
        return values[: len(prompts)]

    with running_service(MarkingBackend()) as url:
        _, spans = reward_funcs(url, url)
        trainer = make_trainer(tmp_path, [partial, spans], {"max_completion_length": 8})
        outputs = []
        generate = trainer._generate_and_score_completions
        trainer._generate_and_score_completions = lambda i: (
            outputs.append(generate(i)) or outputs[0]
        )
        trainer.train()
    advantages_BT, mask_BT = outputs[0]["advantages"], outputs[0]["tool_mask"]
    assert not advantages_BT[:3].any() and not mask_BT[:3].any()
    assert advantages_BT[3:].any(dim=1).all() and mask_BT[3:].any(dim=1).all()
    assert torch.isfinite(advantages_BT).all()
    assert outputs[0]["num_items_in_batch"] == mask_BT.sum()
    (line,) = (line for line in trainer.state.log_history if "coverage" in line)
    assert line["coverage"] == 13 / 16 and 0 < line["penalized_tokens"] <= 1
    # Completions without a reward are not in TRL's own mean either: 12 x -1 and -2, and the spans'.
    scores = line["rewards/xcomet/mean"]
    assert line["reward"] == pytest.approx(-14 / 13 + scores, rel=1e-5)


class PartlyRead(MarkingBackend):
    """Reads the first character of a text only."""

    def encode(self, samples, options):
        encoded = super().encode(samples, options)
        for entry in encoded:
            entry.fields["mt_covered"] = 1
        return encoded


@pytest.mark.parametrize("beta", [0.0, 0.1])
def test_tokens_that_the_service_has_not_read_have_a_kl_at_most(tmp_path, beta):
    with running_service(PartlyRead()) as url:
        _, spans = reward_funcs(url, url)
        trainer = make_trainer(tmp_path, [spans], {"max_completion_length": 8, "beta": beta})
        outputs = []
        generate = trainer._generate_and_score_completions
        trainer._generate_and_score_completions = lambda i: (
            outputs.append(generate(i)) or outputs[0]
        )
        trainer.train()
    (output,) = outputs
    for index, credit in enumerate(spans.credits):
        covered = torch.tensor(credit.valid)
        size = len(covered)
        assert not output["advantages"][index][:size][~covered].any()
        trained = output["tool_mask"][index][:size].bool()
        assert torch.equal(trained, covered if beta == 0 else torch.ones_like(covered))


# -- options --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ({"scale_rewards": "none"}, {}, "scale_rewards: has no effect"),
        ({"multi_objective_aggregation": "normalize_then_sum"}, {}, "multi_objective_aggregation:"),
        ({}, {"advantage_norm": "all"}, "'all' does not exist. Set one of batch, group, grpo"),
        ({}, {"advantage_eps": math.nan}, "advantage_eps: nan is no number"),
        ({}, {"advantage_eps": -1.0}, "advantage_eps: -1.0 is no number"),
    ],
)
def test_an_option_without_effect_is_refused(tmp_path, arguments, options, message):
    functions = reward_funcs("http://127.0.0.1:1", "http://127.0.0.1:1")
    with pytest.raises(UserError, match=message):
        make_trainer(tmp_path, functions, arguments, **options)
    with pytest.raises(UserError, match="no SpanRewards among them"):
        make_trainer(tmp_path, functions[:1])


def test_a_setting_that_is_wrong_is_told_at_once():
    for settings, message in (
        ({"weight": math.inf}, "weight: inf is no finite number"),
        ({"src_pattern": "("}, "src_pattern"),
        ({"postprocess": "gone"}, "postprocess 'gone'"),
        ({"severity_weights": {"MAJOR": math.nan}}, "severity_weights.MAJOR: nan"),
        ({"severity_weights": {"MAJOR": -1e30}, "weight": 1e30}, "severity_weights.MAJOR: -1e"),
        ({"severity_weights": {}}, "no severity has a weight"),
        ({"severity_weights": {"UNKNOWN": None}}, "no severity has a weight"),
        ({"overlap_policy": "any"}, "overlap_policy: 'any' does not exist"),
        ({"overlap_threshold": math.nan}, "overlap_threshold: nan is no share"),
        ({"combine": "mean"}, "combine: 'mean' does not exist"),
        ({"stop_ids": 5}, "stop_ids: 5 are no token ids"),
        ({"stop_ids": "5"}, "stop_ids: '5' are no token ids"),
    ):
        with pytest.raises(UserError, match=message):
            SpanRewards("http://127.0.0.1:1", tokenizer=byte_level_tokenizer(), **settings)
