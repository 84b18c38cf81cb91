"""Run our binding for verl in verl's own classes (`make test-verl`)."""

from __future__ import annotations

import math
from statistics import fmean, pstdev

import pytest
import yaml

from scorekit.schemas import TranslationSample
from scorekit.server.fake import FakeBackend, fake_score
from testing.servers import running_service
from tests.kits.trainer.verl.cases import VERL, probe

MANAGERS = ["naive", "dapo", "gdpo"]
TEXT = "그 집은 red colour 이다."
#: Two prompts: one with two completions, one whose second completion was not scored.
REWARDS = [[0.0, -1.0, 3.0, 0.0], [0.0, 0.0, 0.0, 1.0], [-5.0, 7.0, 0.0, 0.0]]
#: Name -> settings of the agent loop, and a part of the message.
WRONG_LOOPS = {
    "weight": ({"severity_weights": {"MAJOR": math.nan}}, "severity_weights.MAJOR: nan is no"),
    "weights": ({"severity_weights": ["MAJOR"]}, "severity_weights: a "),
    "no_weight": ({"severity_weights": {}}, "no severity has a weight"),
    "stop_ids": ({"stop_ids": 5}, "stop_ids: 5 are no token ids"),
    "settings": ({"settings": "x"}, "settings: 'x' are no settings"),
}
MASK = [[1, 1, 1, 0], [1, 1, 1, 1], [1, 1, 0, 0]]

pytestmark = [
    pytest.mark.verl,
    pytest.mark.skipif(not VERL.exists(), reason="no .venv-verl: `make env-verl` makes it"),
]


def _score(mt, top, src="a"):
    return fake_score(TranslationSample(src=src, mt=mt), top)


class Short(FakeBackend):
    """Reads the first six characters of a text only."""

    def encode(self, samples, options):
        encoded = super().encode(samples, options)
        for entry in encoded:
            entry.fields["mt_covered"] = 6
        return encoded


class Straying(FakeBackend):
    """Marks a span past the end of a text, or one of an unknown severity."""

    def _outcome(self, sample):
        end, severity = (99, "MAJOR") if "past" in sample.mt else (1, "UNKNOWN")
        return {"score": 0.5, "error_spans": [{"start": 0, "end": end, "severity": severity}]}


def _definition(metricx, xcomet):
    return {
        "components": {
            "metricx": {"service": metricx, "offset": 5.0, "scale": -1.0},
            "xcomet": {"service": xcomet, "weight": 2.0},
            "with_ref": {"service": xcomet, "reference": True, "weight": 0.0},
        },
    }


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder = tmp_path_factory.mktemp("verl")
    metricx_backend, xcomet_backend = FakeBackend("metricx"), FakeBackend("xcomet")
    with (
        running_service(metricx_backend) as metricx,
        running_service(xcomet_backend) as xcomet,
        running_service(Short("xcomet")) as short,
        running_service(Straying("xcomet")) as straying,
    ):
        path = folder / "reward.yaml"
        path.write_text(yaml.safe_dump(_definition(metricx, xcomet)))
        composite = {"settings": {"definition": str(path)}}
        calls = (
            {
                name: [
                    "managed",
                    {"manager": name, "settings": {"url": [metricx]}, "texts": ["가"]},
                ]
                for name in MANAGERS
            }
            | {
                "composite": ["managed", {"manager": "naive", "texts": [TEXT, "다"], **composite}],
                "tokens": ["tokens", {"texts": [TEXT, "xyzw"], "settings": {"url": xcomet}}],
                "cut": ["tokens", {"texts": ["xyzw"], "settings": {"url": xcomet}, "ends": False}],
                "short": ["tokens", {"texts": [TEXT], "settings": {"url": short}}],
                "weighted": [
                    "tokens",
                    {
                        "texts": [TEXT],
                        "settings": {"url": xcomet},
                        "severity_weights": {"MINOR": -0.5, "MAJOR": -0.25, "CRITICAL": None},
                    },
                ],
                "straying": [
                    "tokens",
                    {"texts": ["past", "unknown"], "settings": {"url": straying}},
                ],
                "spanless": ["tokens", {"texts": [TEXT], "settings": {"url": metricx}}],
                "composite_tokens": [
                    "tokens",
                    {"texts": [TEXT], "span_component": "xcomet", **composite},
                ],
                **{
                    f"wrong_{name}": [
                        "tokens",
                        {"texts": [TEXT], "settings": {"url": xcomet}} | options,
                    ]
                    for name, (options, _) in WRONG_LOOPS.items()
                },
                "large": [
                    "tokens",
                    {
                        "texts": ["xyzw"],
                        "settings": {"url": xcomet},
                        "ends": False,  # the last token's penalty moves to the one before it
                        "severity_weights": dict.fromkeys(("MINOR", "MAJOR", "CRITICAL"), -3e38),
                    },
                ],
                "nan_advantages": [
                    "advantages",
                    _BATCH | {"rewards": [[math.nan] * 4, *REWARDS[1:]]},
                ],
                "inf_advantages": [
                    "advantages",
                    _BATCH | {"rewards": [*REWARDS[:2], [-math.inf] * 4]},
                ],
                "masked_nan": ["advantages", _MASKED],
                "advantages": ["advantages", _BATCH],
                "returned": ["advantages", _BATCH | {"estimator": "reinforce_plus_plus"}],
                "summed": ["advantages", _BATCH | {"estimator": "grpo"}],
                "alone_grpo": [
                    "advantages",
                    {
                        "rewards": [[0.0, 7.0]],
                        "mask": [[1, 1]],
                        "groups": ["q"],
                        "estimator": "grpo",
                    },
                ],
                "none_mean": ["validation_means", {"values": [0.5, None, 1.0]}],
                "nan_mean": ["validation_means", {"values": [0.5, math.nan, 1.0]}],
            }
        )
        yield probe(folder, calls) | {
            "scored": [sum(metricx_backend.batches), sum(xcomet_backend.batches)]
        }


_BATCH = {"rewards": REWARDS, "mask": MASK, "groups": ["p", "p", "q"]}
#: A row without a valid token, and a masked token before the last valid one: neither counts.
_MASKED = {
    "rewards": [[math.nan, 1.0], [0.0, 3.0], [math.nan, math.nan]],
    "mask": [[0, 1], [1, 1], [0, 0]],
    "groups": ["p", "p", "q"],
}


@pytest.mark.parametrize("name", MANAGERS)
def test_reward_managers_log_the_reward_and_its_components(results, name):
    score = _score("가", 25.0)
    expected = {"score": 5.0 - score, "metricx": score}
    assert results[name] == [{"reward_score": 5.0 - score, "reward_extra_info": expected}]


def _composite(mt):
    metricx, xcomet = _score(mt, 25.0), _score(mt, 1.0)
    return 5.0 - metricx + 2.0 * xcomet, metricx, xcomet


def test_a_definition_gives_the_reward_and_its_numbers(results):
    for mt, answer in zip((TEXT, "다"), results["composite"], strict=True):
        reward, metricx, xcomet = _composite(mt)
        assert answer["reward_score"] == pytest.approx(reward)
        assert answer["reward_extra_info"] == {
            "score": answer["reward_score"],
            "component/metricx": pytest.approx(metricx),
            "scaled/metricx": pytest.approx(5.0 - metricx),
            "component/xcomet": pytest.approx(xcomet),
            "scaled/xcomet": pytest.approx(xcomet),
            "component/with_ref": None,  # weight 0, and the row has no reference
            "scaled/with_ref": None,
        }


def test_one_request_gives_the_sequence_reward_and_the_token_rewards(results):
    (tokens,) = results["composite_tokens"]
    reward, _, xcomet = _composite(TEXT)
    assert tokens["extra"]["score"] == pytest.approx(reward) == tokens["rewards"][-1]
    assert tokens["extra"]["component/xcomet"] == pytest.approx(xcomet)
    assert tokens["rewards"][:-1] == results["tokens"][0]["rewards"][:-1]
    # metricx: 가, TEXT, 다. xcomet: TEXT, 다, xyzw. What was scored before comes from the cache;
    # `spanless` asks metricx for TEXT again.
    assert results["scored"] == [3, 3]


def test_the_agent_loop_rewards_each_token(results):
    tokens, latin = results["tokens"]
    sequence = _score(TEXT, 1.0)
    assert len(tokens["rewards"]) == len(tokens["ids"]) > 2 and set(tokens["mask"]) == {1}
    assert tokens["rewards"][-1] == pytest.approx(sequence, abs=1e-6)
    # red is MINOR, colour MAJOR: one token each.
    assert sorted(r for r in tokens["rewards"][:-1] if r) == [-5.0, -1.0]
    assert tokens["reward_score"] == pytest.approx(sequence - 6.0)
    assert tokens["extra"] == {"score": pytest.approx(sequence), "xcomet": pytest.approx(sequence)}
    assert all(reward == -5.0 for reward in latin["rewards"][:-1])
    (weighted,) = results["weighted"]
    assert sorted(r for r in weighted["rewards"][:-1] if r) == [-0.5, -0.25]


def test_a_span_on_the_last_token_moves_to_the_one_before(results):
    (cut,), tokens = results["cut"], results["tokens"][1]
    assert len(cut["ids"]) == len(tokens["ids"]) - 1 >= 2
    assert cut["rewards"][-1] == pytest.approx(_score("xyzw", 1.0), abs=1e-6)
    assert sum(cut["rewards"]) == pytest.approx(sum(tokens["rewards"]), abs=1e-5)


def test_tokens_that_the_service_has_not_read_leave_the_loss(results):
    (tokens,) = results["short"]
    mask, rewards = tokens["mask"], tokens["rewards"]
    assert mask == sorted(mask, reverse=True) and 0 < sum(mask) < len(mask) - 1
    assert rewards[sum(mask) - 1] == pytest.approx(_score(TEXT, 1.0), abs=1e-6)
    assert not any(rewards[sum(mask) :])


def test_spans_that_do_not_fit_raise(results):
    past, unknown = results["straying"]
    assert past.startswith("SampleError: ") and "a span is outside the text of 4" in past
    assert unknown.startswith("RunEnds: ") and "UNKNOWN" in unknown
    (spanless,) = results["spanless"]
    assert spanless.startswith("RunEnds: components.metricx: the service marks no error spans")


def test_advantages_keep_positions_and_center_groups(results):
    raw = [[1.0, 0.0, 1.0, None], [-1.0] * 4, [-5.0, 0.0, None, None]]
    values = [value for row in raw for value in row if value is not None]
    mean, deviation = fmean(values), pstdev(values)
    for row, expected in zip(results["advantages"], raw, strict=True):
        scaled = [0.0 if v is None else (v - mean) / (deviation + 1e-8) for v in expected]
        assert row == pytest.approx(scaled, abs=1e-6)


@pytest.mark.parametrize("name", WRONG_LOOPS)
def test_an_agent_loop_with_a_wrong_setting_is_not_made(results, name):
    (answer,) = results[f"wrong_{name}"]
    assert answer.startswith("RunEnds: ") and WRONG_LOOPS[name][1] in answer


@pytest.mark.parametrize("name", ["nan", "inf"])
def test_a_reward_that_is_no_number_never_becomes_an_advantage(results, name):
    answer = results[f"{name}_advantages"]
    assert answer == "ValueError: token_level_rewards: a reward is NaN or infinite"


def test_penalties_that_float32_cannot_hold_raise(results):
    assert results["large"] == ["ValueError: a token reward is not finite"]


def test_a_reward_that_counts_nowhere_may_be_nan(results):
    values = [advantage for row in results["masked_nan"] for advantage in row]
    assert values == [
        0.0,
        pytest.approx(-1.414, abs=1e-3),
        *[pytest.approx(0.707, abs=1e-3)] * 2,
        0,
        0,
    ]


def test_the_estimators_that_are_refused_lose_positions(results):
    """Check grpo, which gives all tokens one advantage, and one that is allowed."""
    for row, mask in zip(results["summed"], MASK, strict=True):
        assert len({value for value, valid in zip(row, mask, strict=True) if valid}) == 1
    first, _, third = results["returned"]
    assert len(set(first[:3])) == 3 - 1 and first[1] < first[2]  # rewards to go: 2, 2, 3
    assert third[0] < third[1]  # 2, 7


def test_verl_s_grpo_gives_a_completion_that_is_alone_its_raw_reward(results):
    assert results["alone_grpo"] == [[pytest.approx(7.0, rel=1e-4)] * 2]


def test_verl_s_means_leave_out_a_component_that_is_none(results):
    assert results["none_mean"] == {"mean@2": 0.75}
    assert list(map(math.isnan, results["nan_mean"].values())) == [True]
